"""Table 3's protocol: the paper's numbers, the choice on validation, the command as a whole."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from evenhand.data import save_dataset
from evenhand.errors import UserError
from experiments import table3
from experiments.reproduce import QUICK_3
from experiments.table2 import Run
from experiments.table3 import (
    Protocol,
    Trial,
    config_of,
    fixture,
    format_table3,
    open_any,
    run_table3,
)

TRIAL = Trial(512, 0.01, 500, 1)
TINY = dataclasses.replace(QUICK_3, steps=(2,), seeds=(1, 2))


def console():
    return Console(file=io.StringIO(), width=200)


def run_in(folder):
    device = torch.device("cpu")
    return Run(table="3", folder=folder, command="", device=device, console=console())


def wide(num_labels):
    dataset = fixture(num_rows=3000)
    return dataclasses.replace(dataset, num_labels=num_labels)


def test_the_settings_are_those_of_the_paper():
    config = config_of(Protocol(), wide(10_000), TRIAL)
    mining = config.mining
    sizes = mining.batch_size, mining.num_sampled_labels, mining.num_hard_labels
    assert sizes == (2048, 4096, 64)
    assert (mining.method, mining.num_hard_examples, mining.sampler) == ("s2m", 512, "uniform")
    assert (mining.masks_all_positives, config.loss.power) == (False, 1)
    other = config_of(Protocol(power=2.0, masks_all_positives=True), wide(60), TRIAL)
    assert (other.mining.masks_all_positives, other.loss.power) == (True, 2)
    model = config.model
    assert (model.embedding_dim, model.similarity, model.hidden_widths) == (512, "cosine", ())
    assert config.loss.name == "contrastive"
    snm = config_of(Protocol(), wide(60), Trial(2048, 0.01, 500, 1)).mining
    assert (snm.method, snm.num_sampled_labels, snm.num_hard_labels) == ("snm", 59, 59)


def test_settings_are_chosen_on_validation_with_equal_trials_and_the_test_part_is_seen_once(
    tmp_path, monkeypatch
):
    asked = []
    inner = table3.evaluate_model

    def watched(model, dataset, part_name, config, **rest):
        asked.append((part_name, config.mining.num_counting, config.training.learning_rate))
        return inner(model, dataset, part_name, config, **rest)

    monkeypatch.setattr(table3, "evaluate_model", watched)
    result = run_table3(TINY, fixture(), run_in(tmp_path))
    of_test = [place for place, name in enumerate(asked) if name[0] == "test"]
    assert of_test == [4, 5, 6, 7]  # two trials for each of two k', then two seeds
    for row in result["rows"]:
        own = [t for t in result["trials"] if t["num_hard_examples"] == row["num_hard_examples"]]
        assert len(own) == 2
        assert row["learning_rate"] == max(own, key=lambda t: t["mean_recall"])["learning_rate"]
    assert {cell["group"] for cell in result["cells"]} == {
        "all", "head", "torso", "tail", "head over pairs", "torso over pairs", "tail over pairs",
    }  # fmt: skip
    assert len(result["cells"]) == 4 * 7
    assert format_table3(result).row_count == 4 * 7


def test_a_folder_is_continued_unless_it_is_of_other_data_or_another_model(tmp_path, monkeypatch):
    first = run_table3(TINY, fixture(), run_in(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(table3, "train", None)  # the same command trains nothing again
        assert run_table3(TINY, fixture(), run_in(tmp_path)) == first
    with pytest.raises(UserError, match="begun with data = "):
        run_table3(TINY, fixture(seed=1), run_in(tmp_path))
    with pytest.raises(UserError, match="begun with embedding_dim = "):
        run_table3(dataclasses.replace(TINY, embedding_dim=7), fixture(), run_in(tmp_path))


def test_text_files_and_prepared_folders_are_opened(tmp_path):
    lines = ["6 4 3", *["0,1 0:1 1:0.5", "2 2:1", "1 3:2"] * 2]
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert open_any(str(tmp_path), console()).num_labels == 3
    save_dataset(fixture(), tmp_path / "made")
    assert open_any(str(tmp_path / "made"), console()).num_labels == 60


def test_what_the_table_cannot_be_made_of_is_refused(tmp_path):
    data = fixture()
    parts = {name: part for name, part in data.parts.items() if name != "validation"}
    with pytest.raises(UserError, match="no validation part"):
        run_table3(TINY, dataclasses.replace(data, parts=parts), run_in(tmp_path))
    with pytest.raises(UserError, match="too small for this table"):
        run_table3(dataclasses.replace(TINY, hard_examples=(1000,)), data, run_in(tmp_path))
