"""The examples learn their task in seconds; and in Lightning the loss is that of the core."""

import importlib
import math
import warnings

import pytest
import torch

from evenhand import S2MLoss, mask_positives, s2m_loss
from examples.two_towers import NAMES, SCALE, trigrams_of


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("two_towers", "torch"),
        ("lightning_towers", "lightning"),
        ("sklearn_pipeline", "sklearn"),
        ("fine_tuning", "sentence_transformers"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of other libraries, about themselves
def test_misspelt_names_are_found(name, package):
    pytest.importorskip(package)
    assert importlib.import_module(f"examples.{name}").main() > 0.6


def make_towers(**options):
    lightning_towers = pytest.importorskip("examples.lightning_towers")
    torch.manual_seed(0)
    towers = lightning_towers.Towers()
    towers.loss_fn = S2MLoss(len(NAMES), num_sampled_labels=len(NAMES), **options)
    return towers, lightning_towers


def test_a_step_in_lightning_has_the_loss_and_gradient_of_the_core():
    options = {"num_hard_labels": 5, "tail_fraction": 0.25, "mined_share": 1.0, "anneal_steps": 0}
    towers, _ = make_towers(loss_ceiling=math.inf, **options)
    towers.tower.eval()  # without dropout
    queries, ids = trigrams_of([name[1:] for name in NAMES[:8]]), torch.arange(8)
    loss = towers.training_step((queries, ids), 0)

    vectors, names = SCALE * towers.tower(queries), towers.tower(towers.names)
    scores = mask_positives(vectors @ names.T, torch.arange(len(NAMES)), ids.unsqueeze(1))
    positives = (vectors * names[:8]).sum(1)
    expected = s2m_loss(positives, scores, num_hard_labels=5, num_hard_examples=2)
    torch.testing.assert_close(loss, expected)
    weights = list(towers.tower.parameters())
    for own, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_a_checkpoint_of_lightning_holds_how_far_mining_is(tmp_path):
    towers, lightning_towers = make_towers()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning_towers.lightning.Trainer(max_steps=3, accelerator="cpu", **options)
        trainer.fit(towers, lightning_towers.loader(256, seed=1))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        loaded = type(towers).load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.loss_fn.step == 3
