"""Arguments and flags that several verbs take, and what they stand for."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evenhand.errors import UserError

if TYPE_CHECKING:
    import torch

    from evenhand.config import Config


def flag(help: str, *names: str, **more: Any) -> Any:
    """A flag, called as its parameter is, or by these names."""
    if "min" in more:
        more = {"metavar": "<int>", **more}
    return typer.Option(*names, help=help, **more)


def argument(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar)


RunFolder = Annotated[Path, argument("Run folder.", "RUN")]
RunFolders = Annotated[list[Path], argument("Run folders.", "RUN...")]
PartName = Literal["train", "validation", "test"]
Part = Annotated[PartName, flag("Part of the data to look at.")]
MovedData = Annotated[
    Path | None, flag("Where the data set is now, if it has moved since training.")
]
Device = Annotated[
    str | None, flag("cpu, cuda, cuda:1, ...", show_default="the GPU if there is one")
]
RankTimeout = Annotated[
    float, flag("Seconds that a rank waits for the others before it names the late one and ends.")
]

# --- settings, as `train` and `tune` take them ----------------------------------------------------

ConfigFile = Annotated[
    Path | None, argument("TOML file with settings, or a preset's name.", "[CONFIG]")
]
DataSet = Annotated[str | None, flag("'places', or a folder made by `evenhand data`.")]
MethodName = Annotated[str | None, flag("Method; `evenhand --help` lists them.")]
HardLabels = Annotated[int | None, flag("k: hardest labels kept for an example.")]
HardExamples = Annotated[int | None, flag("k': hardest examples kept of a batch.")]
SmallestShare = Annotated[
    float | None, flag("k' from the share of the smallest group, such as 0.02.")
]
SmallestGroup = Annotated[str | None, flag("k' from the name of that group, such as script=THAI.")]
Steps = Annotated[int | None, flag("Training steps.")]
LearningRate = Annotated[float | None, flag("Highest learning rate.")]
Assignments = Annotated[
    list[str] | None,
    flag(
        "Any setting, such as loss.name=softmax or model.embedding_dim=512; repeatable.",
        "--set",
        metavar="SECTION.KEY=VALUE",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsFlags:
    """What `train` and `tune` were told about settings; None: not given."""

    config: Path | None = None
    data: str | None = None
    method: str | None = None
    hard_labels: int | None = None
    hard_examples: int | None = None
    smallest_share: float | None = None
    smallest_group: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    assignments: list[str] | None = None

    @property
    def smallest(self) -> float | str | None:
        """The share of the smallest group, or its name."""
        return self.smallest_share if self.smallest_group is None else self.smallest_group

    def words(self) -> list[str]:
        """The flags as assignments; those of --set have the last word."""
        from evenhand.config import toml_value

        flags = {
            "data.dataset": self.data,
            "mining.method": self.method,
            "mining.num_hard_labels": self.hard_labels,
            "mining.num_hard_examples": self.hard_examples,
            "training.num_steps": self.steps,
            "training.learning_rate": self.learning_rate,
            "training.seed": self.seed,
        }
        given = [f"{name}={toml_value(flag)}" for name, flag in flags.items() if flag is not None]
        return [*given, *(self.assignments or [])]


def read_config(flags: SettingsFlags, *, default: Path | None = None) -> "Config":
    """The config of the TOML file or preset, or else of the default file, with the flags on top."""
    from evenhand.cli.console import console
    from evenhand.config import (
        build_config,
        preset_names,
        read_preset,
        read_settings,
        with_assignments,
    )
    from evenhand.tuning.space import build_guarding_config

    path = flags.config or default
    settings = {}
    if path is not None and not path.exists() and str(path) in preset_names():
        settings = read_preset(str(path))
    elif path is not None:
        settings = read_settings(path)
    words = flags.words()
    settings = with_assignments(settings, words)
    if flags.smallest is None:
        return build_config(settings)
    is_set = any(word.partition("=")[0].strip() == "mining.num_hard_examples" for word in words)
    if is_set or None not in (flags.smallest_share, flags.smallest_group):
        raise UserError(
            "--smallest-share, --smallest-group and --hard-examples all set k'; give one of them"
        )
    return build_guarding_config(settings, flags.smallest, console)


def choose_device(name: str | None) -> "torch.device":
    """The device of --device, tried out; without a name, the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton's kernels and new streams go
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used here: {error}") from error
    return device
