"""What collapses, what prevents it, and who notices."""

import copy
import math
from pathlib import Path

import pytest
import torch

from evenhand import S2MLoss
from evenhand.build import build_training
from evenhand.config import build_config
from evenhand.losses import contrastive_loss, softmax_loss
from evenhand.objective import collapsed_loss
from evenhand.risk import count_below, even_weights, top_weights
from evenhand.runs import evaluate_model
from evenhand.training.loop import train
from examples import own_encoder


def test_a_collapsed_model_has_the_loss_of_a_guess():
    assert collapsed_loss(softmax_loss, 128, score=20.0) == pytest.approx(4.8598, abs=1e-4)
    assert collapsed_loss(contrastive_loss, 5, score=1.0) == pytest.approx(0.7**2)


@pytest.mark.parametrize("ceiling", [-1.0, 0.0, 1.2, 2.0, 7.0, 100.0])
@pytest.mark.parametrize("num_hard_examples", [1, 4, 20])
def test_k_grows_to_the_least_that_is_below_the_ceiling(ceiling, num_hard_examples):
    losses = torch.rand(20, generator=torch.Generator().manual_seed(1)) ** 4 * 9
    count = count_below(losses, num_hard_examples, ceiling=ceiling)
    means = [losses.topk(k).values.mean().item() for k in range(1, 21)]
    below = [k for k in range(num_hard_examples, 21) if means[k - 1] <= ceiling]
    assert count == (below[0] if below else 20)


@pytest.mark.parametrize(("ceiling", "collapses"), [({}, False), ({"loss_ceiling": 0.0}, True)])
def test_a_deep_encoder_collapses_and_is_warned_of_where_no_ceiling_prevents_it(ceiling, collapses):
    settings, dataset = copy.deepcopy(own_encoder.SETTINGS), own_encoder.make_dataset(1500)
    settings["mining"] |= {"method": "s2m", "num_hard_examples": 16, **ceiling}
    settings["training"] |= {"num_steps": 160, "log_every": 20}
    config, said = build_config(settings), []
    torch.manual_seed(0)
    encoder = own_encoder.GruEncoder()
    built = build_training(config, dataset, torch.device("cpu"), encoder=encoder)
    train(built.training, built.plan, built.choose_step().step, warn_fn=said.append)
    ranks = evaluate_model(built.training.model, dataset, "validation", config).ranks
    assert ((ranks == 1).mean() < 0.1) == collapses
    assert [words.partition(":")[0] for words in said] == collapses * ["the encoder has collapsed"]


@pytest.mark.parametrize(("loss_ceiling", "num_mined"), [(math.inf, 1), (0.75, 4), (0.5, 6)])
def test_the_loss_module_mines_no_more_than_the_ceiling_allows(loss_ceiling, num_mined):
    queries, labels = torch.eye(8, requires_grad=True), 9 * torch.eye(8)
    labels[:3] = 0  # their losses are log 8, and those of the others next to nothing
    options = {"mined_share": 1.0, "anneal_steps": 0, "tail_fraction": 1 / 8}
    S2MLoss(loss_ceiling=loss_ceiling, **options)(queries, labels, torch.arange(8)).backward()
    assert int((queries.grad != 0).any(1).sum()) == num_mined


def test_the_benchmark_weighs_examples_as_the_core_does(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import collapse

    cases = [*collapse.CASES.values(), *collapse.REPAIRS.values()]
    columns = collapse.as_columns(cases, torch.device("cpu"))
    losses = 9 * torch.rand(len(cases), collapse.BATCH, generator=torch.Generator()) ** 3
    for progress in (0.0, 0.3, 0.9):
        found = collapse.weights_of(losses, columns, progress)
        for own, case, weights in zip(losses, cases, found, strict=True):
            guess = math.log(case.get("k", collapse.SAMPLED) + 1)
            count = case.get("k_prime", collapse.BATCH)
            if "anneal" in case:
                count = round(collapse.BATCH + progress * (count - collapse.BATCH))
            count = count_below(own, count, ceiling=case.get("ceiling", math.inf) * guess)
            count = collapse.BATCH if progress < case.get("warm_up", 0) else count
            share, is_out = case.get("share", 1.0), own > case.get("hopeless", math.inf) * guess
            is_out = is_out.index_fill(0, own.topk(case.get("dropped", 0)).indices, True)
            if "even" in case:
                expected = even_weights(
                    own,
                    torch.zeros_like(own),
                    num_hard_examples=count,
                    mined_share=share,
                    is_held_out=is_out,
                )
            else:
                kept = own.masked_fill(is_out, -torch.inf)
                mined = top_weights(kept, num_hard_examples=min(count, int((~is_out).sum())))
                expected = share * mined + (1 - share) / collapse.BATCH
            torch.testing.assert_close(weights, expected)
