"""What is sent to TensorBoard and MLflow is what metrics.jsonl holds, each row once."""

import json
import sys
import warnings

import pytest

from evenhand.errors import UserError
from evenhand.integrations import loggers
from evenhand.integrations.loggers import check_logger, log_metrics


@pytest.fixture
def begun(tmp_path):
    """A run that a kill has left after ten steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('[training]\nnum_steps = 20\n[data]\ndataset = "x"\n')
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 2.0}\n{"step": 10, "loss": 1.5}\n')
    return folder


def go_on(folder):
    """As a resumed run does: it goes back to its checkpoint and repeats what it wrote."""
    path = folder / "metrics.jsonl"
    path.write_text('{"step": 5, "loss": 2.0}\n')
    rows = [
        {"step": 10, "loss": 1.5},
        {"step": 20, "loss": 1.0},
        {"step": 20, "validation": {"recall@1": 0.5}},
    ]
    with open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "lo')


def test_rows_are_sent_once_also_after_a_resume(begun, monkeypatch):
    sent = []
    monkeypatch.setattr(loggers, "SECONDS", 0.01)
    monkeypatch.setattr(
        loggers,
        "_open_logger",
        lambda *_: loggers.contextlib.nullcontext(lambda *own: sent.append(own)),
    )
    with log_metrics(begun, "any"):
        go_on(begun)
    assert sent == [({"train/loss": 1.0}, 20), ({"validation/recall@1": 0.5}, 20)]


def test_tensorboard_has_the_rows(begun):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with log_metrics(begun, "tensorboard"):
        go_on(begun)
    found = events.EventAccumulator(str(begun / "tensorboard")).Reload()
    assert [(row.step, row.value) for row in found.Scalars("train/loss")] == [(20, 1.0)]
    assert [row.value for row in found.Scalars("validation/recall@1")] == [0.5]


def test_mlflow_has_the_rows_and_the_settings(begun, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    with pytest.raises(UserError, match="name a server by MLFLOW_TRACKING_URI"):
        log_metrics(begun, "mlflow").__enter__()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):  # the second time in the same run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with log_metrics(begun, "mlflow"):
                go_on(begun)
    run = mlflow.get_run((begun / "mlflow-run-id").read_text())
    assert run.data.metrics == {"train/loss": 1.0, "validation/recall_at_1": 0.5}
    assert run.data.params["training.num_steps"] == "20"
    assert run.info.run_name == "run"


@pytest.mark.parametrize("log_to", ["tensorboard", "mlflow"])
def test_an_extra_that_is_not_installed_is_named(log_to, monkeypatch):
    monkeypatch.setitem(sys.modules, log_to, None)
    with pytest.raises(UserError, match=rf"pip install 'evenhand\[{log_to}\]'"):
        check_logger(log_to)
