"""Labels that a tower reads: the step against the obvious formula, staleness, and new labels."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import evenhand
import small
from evenhand import UserError
from evenhand.build import build_training
from evenhand.data.text import normalize
from evenhand.losses import softmax_loss
from evenhand.mining import hardest_labels, mask_positives
from evenhand.models import unit
from evenhand.training.step import refresh_labels, train_step
from letters import Letters, answers, command
from split_training import take_steps

CPU = torch.device("cpu")
BASE = {
    "mining__method": "s2m",
    "loss__name": "softmax",
    "model__scale": 5.0,
    "training__evaluate_every": 0,
}


def training_of(kind="bag", **changes):
    """A double-precision training whose labels are read by a bag of n-grams, or from letters."""
    encoder = None
    settings = {**BASE, "model__labels": "tower", **changes}
    dataset = small.text_dataset()
    if kind == "letters":
        encoder = Letters()
        encoder.layers[0].p = 0.0
        settings |= {"model__encoder": "own", "model__input": "texts", "model__embedding_dim": 12}
    built = build_training(small.config("unused", **settings), dataset, CPU, encoder=encoder)
    training = built.training
    training.model.double()
    for optimizer in training.optimizers.rows.values():
        for name, state in vars(optimizer).items():
            if isinstance(state, torch.Tensor) and name != "table":
                setattr(optimizer, name, state.double())
    refresh_labels(training)
    return built


def vectors(module, features):
    if isinstance(features, list):
        return module(features)
    weight = module.weight.requires_grad_()
    bags = features.ids.split(features.offsets.diff().tolist())
    return torch.stack([weight[ids].mean(0) for ids in bags])


def expected_gradients(built, num_hard_examples):
    """By autograd through every label, for what is mined by the table: name -> gradient."""
    training, plan = built.training, built.plan
    model = training.model
    batch = training.feed.next_batch()
    draw = plan.sampler.sample_for_each if plan.draws_for_each else plan.sampler.sample
    sample = draw(batch.positive_ids, plan.num_sampled_labels, generator=training.generator)
    queries = 5 * nn.functional.normalize(vectors(model.encoder, batch.features))
    if batch.query_rows is not None:
        queries = queries[batch.query_rows]
    names = [normalize(name) for name in small.text_dataset().label_names]
    if training.labels.is_read_as_text:
        rows = vectors(model.tower, names)
    else:
        from evenhand.models import features_of

        rows = vectors(model.tower, features_of(training.labels, np.arange(60), device=CPU))
    if model.label_offsets is not None:
        rows = rows + model.label_offsets.requires_grad_()
    labels = nn.functional.normalize(rows)
    positive_ids = batch.positive_ids
    if batch.query_rows is not None:
        positive_ids = positive_ids[batch.query_rows]

    def scores_by(label_vectors):
        scores = queries @ label_vectors.T  # (B, L)
        ids = sample.ids if sample.ids.dim() == 1 else None
        if ids is not None:
            masked = mask_positives(scores[:, ids], ids, positive_ids)
        else:
            masked = mask_positives(scores.gather(1, sample.ids), sample.ids, positive_ids)
        return scores.gather(1, batch.label_ids.unsqueeze(1)).squeeze(1), masked

    old_positive, old_negative = scores_by(unit(model.label_table).detach())
    kept = hardest_labels(old_negative, plan.num_hard_labels)
    old_losses = softmax_loss(old_positive, old_negative.gather(1, kept))
    weights = training.risk.weights(old_losses.detach(), batch, num_hard_examples)
    positive, negative = scores_by(labels)
    losses = softmax_loss(positive, negative.gather(1, kept))
    (weights * losses).sum().backward()
    return {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


def found_gradients(built, scheduled):
    """What a step gives to the optimisers, as dense tensors."""
    training, found = built.training, {}
    names = {
        "features": "encoder.weight",
        "label features": "label_tower.weight",
        "label offsets": "label_offsets",
    }

    def keep(gradients, *, learning_rate):
        weights = dict(training.model.named_parameters())
        for name, (ids, values) in gradients.items():
            found[names[name]] = torch.zeros_like(weights[names[name]]).index_add(0, ids, values)
        for name, weight in weights.items():
            if weight.grad is not None:
                found[name] = weight.grad.clone()

    training.optimizers.step = keep
    training.step = 1  # the table is as it is
    figures = train_step(training, built.plan, scheduled)
    return found, figures


CASES = {
    "bag, shared": {},
    "bag, own tower": {"model__label_tower": "own"},
    "bag, a table too": {"model__labels": "both"},
    "a sample for each": {"mining__for_each_example": True},
    "whole queries": {"mining__whole_queries": True},
    "all labels kept": {"mining__num_sampled_labels": 40, "mining__num_hard_labels": 40},
    "letters, shared": {"kind": "letters"},
    "letters, own tower in chunks": {
        "kind": "letters",
        "model__label_tower": "own",
        "training__chunk_size": 7,
    },
    "letters, a table too": {"kind": "letters", "model__labels": "both"},
}


@pytest.mark.parametrize("is_stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_obvious_formula(name, is_stale):
    one, two = training_of(**CASES[name]), training_of(**CASES[name])
    for built in (one, two):
        noise = torch.Generator().manual_seed(1)
        for own in built.training.model.parameters() if is_stale else ():
            if own is not built.training.model.label_table:
                own.data += 0.1 * torch.randn(own.shape, generator=noise, dtype=torch.float64)
    scheduled = one.plan.at_step(1, batch_size=32)
    expected = expected_gradients(two, scheduled.num_hard_examples)
    found, figures = found_gradients(one, scheduled)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-12, msg=key)
    assert (one.training.label_drift > 1e-4) == is_stale
    assert figures[0] > 0


def test_labels_are_encoded_anew_on_schedule_alone():
    built = training_of(mining__refresh_every=4)
    training, tables = built.training, []
    for _ in range(9):
        take_steps(built, 1)
        tables.append(training.model.label_table.clone())
    changes = [not torch.equal(*pair) for pair in itertools.pairwise(tables)]
    assert changes == [False, False, False, True, False, False, False, True]


def test_ranks_cannot_share_a_tower_and_names_are_needed():
    from evenhand.build import check_splittable

    config = small.config("unused", **BASE, model__labels="tower")
    with pytest.raises(UserError, match="is for one process, and this run has 2"):
        check_splittable(config, num_ranks=2)
    nameless = dataclasses.replace(small.text_dataset(), label_names=None)
    with pytest.raises(UserError, match="reads the labels' names"):
        build_training(config, nameless, CPU)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(folder="runs/run", rows=None, encoder=None, **changes):
    settings = {
        "training.num_steps": 60,
        "training.checkpoint_every": 20,
        "training.log_every": 10,
        "mining.batch_size": 32,
        "mining.num_hard_labels": 8,
        "mining.refresh_every": 10,
        "model.labels": "tower",
        "evaluation.num_resamples": 0,
        **changes,
    }
    how = {"settings": settings, "encoder": encoder, "progress": False, "features": "ngrams"}
    return evenhand.train(rows or named_table(), run=folder, num_buckets=4096, **how)


def named_table(keep=lambda label: True):
    """Misspelt names of towns, whose labels are the names."""
    dataset = small.text_dataset()
    part = dataset.parts["train"]
    firsts = [int(part.positives.ids[start]) for start in part.positives.offsets[:-1]]
    rows = [
        (text, dataset.label_names[label])
        for text, label in zip(part.texts, firsts, strict=True)
        if keep(label)
    ]
    return {"query": [text for text, _ in rows], "label": [name for _, name in rows]}


@pytest.mark.parametrize("kind", ["bag", "letters"])
def test_a_run_finds_labels_that_it_was_never_trained_on(kind, tmp_path, capsys):
    dataset = small.text_dataset()
    encoder = Letters() if kind == "letters" else None
    run = train(rows=named_table(lambda label: label >= 6), encoder=encoder)
    lines = (run.folder / "metrics.jsonl").read_text()
    assert '"label_age": 9' in lines
    assert '"label_drift"' in lines
    before, new = run.encode(["badoki"]), list(dataset.label_names)[:6]
    digests = [small_digest(run)]
    if encoder is None:
        (tmp_path / "new.csv").write_text("id\n" + "\n".join(new))
        command(capsys, "labels", "add", run.folder, "new.csv")
        run = evenhand.load(run.folder, progress=False)
    else:
        run.add_labels({"id": new})
    digests.append(small_digest(run))
    assert digests[0] != digests[1]  # an index of the model before is refused
    assert np.array_equal(run.encode(["badoki"]), before)
    found = run.search([name + "ba" for name in new], 5)
    hits = sum(name in set(found["label"][found["query"] == name + "ba"].tolist()) for name in new)
    assert hits >= (6 if kind == "bag" else 3)
    assert run.add_labels({"id": [new[0], "another"]}) == 7
    assert len(run.searcher.data.label_names) == 54 + 7
    (run.folder / "model/added_labels.safetensors").unlink()
    with pytest.raises(UserError, match="knows all 1 labels already"):
        run.add_labels({"id": [dataset.label_names[30]]})
    if encoder is None:
        run.add_labels({"id": new})
        command(capsys, "export", run.folder, "--out", "vectors")
        assert np.load(next((tmp_path / "vectors").glob("labels*.npy"))).shape[0] == 60


def small_digest(run):
    from evenhand.run_search import model_digest

    return model_digest(run.folder)


def test_training_goes_on_exactly_and_begins_from_another_run(monkeypatch):
    from evenhand import api

    whole, seen = train(), []
    stop = lambda: seen.append(0) or len(seen) == 35  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(api, "stop_requested", lambda: contextlib.nullcontext(stop))
        with pytest.raises(KeyboardInterrupt):
            train("runs/cut")
    cut = evenhand.load("runs/cut", progress=False).resume()
    assert answers(cut) == answers(whole)
    lines = [(run.folder / "metrics.jsonl").read_text() for run in (whole, cut)]
    assert lines[0] == lines[1]
    rates = {"training.num_steps": 1, "training.learning_rate": 1e-9}
    later = train("runs/later", **{"model.init_from": "runs/run"}, **rates)
    assert answers(later) == pytest.approx(answers(whole), abs=1e-4)
    with pytest.raises(UserError, match=r"its label_table is"):
        train("runs/wide", **{"model.init_from": "runs/run", "model.embedding_dim": 8})


def test_tables_and_votes_cannot_take_new_labels():
    run = train(**{"model.labels": "table"})
    with pytest.raises(UserError, match=r"set model.labels=tower"):
        run.add_labels({"id": ["new"]})
