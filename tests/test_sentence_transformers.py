"""The loss for the trainer of sentence-transformers, beside its own."""

import math
import warnings

import pytest
import torch

from evenhand import S2MLoss
from evenhand.integrations.sentence_transformers import S2MRankingLoss, ids_of_texts
from tiny_text import make_transformer

pytest.importorskip("sentence_transformers")
ANCHORS = ["red shoe", "blue hat", "green bag", "dark shoe", "red shoe"]
POSITIVES = ["shoe", "hat", "bag", "shoe", "red"]  # a repeat, and two of one anchor
OTHERS = ["boot", "cap", "sack", "hat", "blue"]  # one is also a positive
SNM = {"num_hard_labels": 100, "tail_fraction": 1.0, "mined_share": 1.0, "anneal_steps": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_transformer(tmp_path_factory.mktemp("model")).double()


def features_of(model, *columns):
    return [model.preprocess(list(texts)) for texts in columns]


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def assert_same(loss, expected, model):
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for own, other in zip(gradients(loss, model), gradients(expected, model), strict=True):
        if other is not None:
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_without_mining_and_repeats_it_is_the_loss_that_they_know(model):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    columns = [ANCHORS[:3], POSITIVES[:3], OTHERS[:3]]
    expected = MultipleNegativesRankingLoss(model)(features_of(model, *columns), None)
    own = S2MRankingLoss(model, S2MLoss(**SNM))(features_of(model, *columns), None)
    assert_same(own, expected, model)


def test_it_gives_the_loss_of_the_core_and_equal_texts_are_one_label(model):
    anchors, positives, others = features_of(model, ANCHORS, POSITIVES, OTHERS)
    options = {"num_hard_labels": 2, "tail_fraction": 0.4, "mined_share": 1.0, "anneal_steps": 0}
    options["loss_ceiling"] = math.inf
    own = S2MRankingLoss(model, S2MLoss(**options), scale=7.0)([anchors, positives, others])

    with_ids = [0, 1, 2, 0, 3, 4, 5, 6, 1, 7]  # positives, then others
    vectors = [
        torch.nn.functional.normalize(model(features)["sentence_embedding"])
        for features in features_of(model, ANCHORS, POSITIVES, OTHERS)
    ]
    both = torch.tensor([[3], [-1], [-1], [-1], [0]])  # of "red shoe", which is there twice
    expected = S2MLoss(**options)(
        7 * vectors[0], torch.cat(vectors[1:]), torch.tensor(with_ids), positive_ids=both
    )
    assert_same(own, expected, model)


def test_texts_of_any_padding_are_told_apart(model):
    columns = [*features_of(model, ["a", "b"]), *features_of(model, ["a", "longer text", "b"])]
    ids = ids_of_texts(columns)
    assert ids[0] == ids[2]
    assert ids[1] == ids[4]
    assert len(ids.unique()) == 3


def test_their_trainer_trains_with_it(model, tmp_path):
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    model = make_transformer(tmp_path)
    pairs = Dataset.from_dict({"anchor": ANCHORS * 8, "positive": POSITIVES * 8})
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=20, per_device_train_batch_size=8, seed=1,
        learning_rate=5e-3, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=5,
        logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    loss = S2MRankingLoss(model, S2MLoss(num_hard_labels=4, anneal_steps=10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their libraries, about their libraries
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=pairs, eval_dataset=pairs, loss=loss
        )
        trainer.train()
    assert loss.loss.step == 20  # what is evaluated is no step
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert losses[-1] < losses[0]
