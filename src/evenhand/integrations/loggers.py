"""What `evenhand train --log-to tensorboard` or `mlflow` sends: the rows of metrics.jsonl, live.

A thread reads the file while the run writes it, so that the training knows nothing of loggers. A
resumed run writes the rows after its checkpoint again, the same ones, and they are sent once.
Extras: evenhand[tensorboard], evenhand[mlflow].
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from evenhand.config import check_choice, read_settings
from evenhand.errors import UserError
from evenhand.files import parse_json, read_text, write_text

SECONDS = 2.0  # between two looks at the file
Send = Callable[[dict[str, float], int], None]  # figures by name, and their step


def check_logger(log_to: str | None) -> None:
    """Refuses a logger that is not known or not installed, before anything is made."""
    if log_to is None:
        return
    check_choice("--log-to", log_to, ("tensorboard", "mlflow"))
    try:
        import_module(log_to)
    except ImportError as error:
        raise UserError(
            f"--log-to {log_to} needs an extra: pip install 'evenhand[{log_to}]'"
        ) from error


@contextlib.contextmanager
def log_metrics(folder: Path, log_to: str | None) -> Iterator[None]:
    """Sends the rows of a run's metrics.jsonl while it is being trained inside.

    Args:
        log_to: "tensorboard", "mlflow"; None: nowhere.
    """
    if log_to is None:
        yield
        return
    path, is_done = folder / "metrics.jsonl", threading.Event()
    sent = set(_lines(path))  # of the run that is resumed
    with _open_logger(folder, log_to) as send:

        def follow() -> None:
            while True:
                is_last = is_done.wait(SECONDS)
                for line in _lines(path):
                    if line not in sent:
                        sent.add(line)
                        row = parse_json(line)
                        send(figures_of(row), row["step"])
                if is_last:
                    return

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()


def figures_of(row: dict[str, Any]) -> dict[str, float]:
    """The figures of a row by name: train/loss, validation/recall@10.

    Example:
        >>> figures_of({"step": 5, "loss": 0.25}), figures_of({"step": 5, "validation": {"mrr": 1}})
        ({'train/loss': 0.25}, {'validation/mrr': 1})
    """
    if "validation" in row:
        return {f"validation/{name}": value for name, value in row["validation"].items()}
    return {f"train/{name}": value for name, value in row.items() if name != "step"}


def _lines(path: Path) -> list[str]:
    """Whole lines alone: the last one may still be being written."""
    return read_text(path).split("\n")[:-1] if path.exists() else []


@contextlib.contextmanager
def _open_logger(folder: Path, log_to: str) -> Iterator[Send]:
    if log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard")) as writer:

            def send_scalars(figures: dict[str, float], step: int) -> None:
                for name, value in figures.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

            yield send_scalars
        return
    import mlflow

    id_path = folder / "mlflow-run-id"  # a resumed run goes on in the same one
    run_id = read_text(id_path) if id_path.exists() else None
    try:
        begun = mlflow.start_run(run_id, run_name=folder.resolve().name)
    except mlflow.exceptions.MlflowException as error:
        reason = str(error).split(". ")[0]
        raise UserError(
            f"mlflow cannot begin a run ({reason}); name a server by MLFLOW_TRACKING_URI, or allow "
            f"a folder by MLFLOW_ALLOW_FILE_STORE=true"
        ) from error
    with begun as run:
        if run_id is None:
            write_text(id_path, run.info.run_id)
            settings = read_settings(folder / "config.toml")
            named = {f"{s}.{key}": v for s, own in settings.items() for key, v in own.items()}
            mlflow.log_params(named)

        def send_metrics(figures: dict[str, float], step: int) -> None:
            # MLflow takes no @ in a name; and the run is named, for it is open in another thread.
            metrics = {name.replace("@", "_at_"): value for name, value in figures.items()}
            mlflow.log_metrics(metrics, step=step, run_id=run.info.run_id)

        yield send_metrics
