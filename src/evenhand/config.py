"""Settings: TOML files and flags, read strictly, written out in full into the run folder."""

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from evenhand.data.weighting import WEIGHTINGS
from evenhand.errors import UserError
from evenhand.files import read_text
from evenhand.losses import (
    LossFn,
    averaged_loss,
    bowl_loss,
    contrastive_loss,
    crammer_singer_loss,
    exponential,
    hinge,
    logistic,
    softmax_loss,
    squared_hinge,
)
from evenhand.methods import METHODS, WITH_ALL_LABELS, WITH_HARD_EXAMPLES
from evenhand.search_config import RankerConfig, SearchConfig
from evenhand.settings import check_choice, check_positive, hint, parsed_toml, told, typed

T = TypeVar("T")

MARGIN_LOSSES = {
    "hinge": hinge,
    "squared-hinge": squared_hinge,
    "logistic": logistic,
    "exponential": exponential,
}
LOSSES = ("contrastive", "softmax", "bowl", "crammer-singer", "averaged")
SAMPLERS = ("uniform", "frequency", "log-uniform", "in-batch", "mixed")
# Tables and products: both float32; float32 and bfloat16; both bfloat16, rows rounded by chance.
PRECISIONS = ("float32", "mixed", "bfloat16")
OPTIMIZERS = ("row-adam", "row-adagrad")
LEARNING_RATE_SHAPES = ("linear", "cosine", "constant")
MAX_CUTOFF = 10**6  # results of a query that are looked at
MAX_POWER = 10  # of counts, by which labels are drawn: beyond it, only the most frequent ones are


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: `places`, or the folder of a data set made by `evenhand data`."""

    dataset: str = "places"
    min_population: int = 15000  # of the cities in `places`: 500, 1000, 5000 or 15000
    num_buckets: int = 2**18  # n-grams of a name are hashed into so many features
    weighting: str = "as-is"  # of feature values: or "unit" (rows of length 1), or "tf-idf"

    def __post_init__(self) -> None:
        if not 1 <= self.num_buckets < 2**31:
            raise UserError(
                f"data.num_buckets must be between 1 and {2**31 - 1}, got {self.num_buckets}"
            )
        check_choice("data.weighting", self.weighting, WEIGHTINGS)

    @property
    def folder(self) -> Path:
        """Where the data set lies; `places` is prepared there once."""
        if self.dataset != "places":
            return Path(self.dataset)
        return Path("datasets") / f"places-{self.min_population}-{self.num_buckets}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    embedding_dim: int = 256
    similarity: str = "cosine"  # or "dot"
    scale: float = 1.0  # of the scores
    label_bias: bool = False  # only with "dot"
    hidden_widths: tuple[int, ...] = ()  # of the perceptron for dense features

    def __post_init__(self) -> None:
        check_positive("model", embedding_dim=self.embedding_dim, scale=self.scale)
        check_choice("model.similarity", self.similarity, ("cosine", "dot"))
        for width in self.hidden_widths:
            check_positive("model", hidden_widths=width)
        if self.label_bias and self.similarity == "cosine":
            raise UserError('model.label_bias goes with model.similarity = "dot"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    name: str = "contrastive"
    margin: float = 0.3  # contrastive: negatives cost above it
    power: float = 1.0  # contrastive
    margin_loss: str = "hinge"  # bowl, crammer-singer, averaged
    log_q: bool = False  # softmax: correct for how often a label is drawn

    def __post_init__(self) -> None:
        check_choice("loss.name", self.name, LOSSES)
        check_choice("loss.margin_loss", self.margin_loss, tuple(MARGIN_LOSSES))
        if not -1 <= self.margin <= 1:
            raise UserError(f"loss.margin must be between -1 and 1, got {self.margin}")
        if not self.power >= 1:
            raise UserError(f"loss.power must be at least 1, got {self.power}")
        if self.log_q and self.name != "softmax":
            raise UserError(f'loss.log_q is for loss.name = "softmax" alone, got "{self.name}"')

    def build(self) -> LossFn:
        margin_loss = MARGIN_LOSSES[self.margin_loss]
        losses: dict[str, LossFn] = {
            "contrastive": partial(contrastive_loss, margin=self.margin, power=self.power),
            "softmax": softmax_loss,
            "bowl": partial(bowl_loss, margin_loss=margin_loss),
            "crammer-singer": partial(crammer_singer_loss, margin_loss=margin_loss),
            "averaged": partial(averaged_loss, margin_loss=margin_loss),
        }
        return losses[self.name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningConfig:
    """How many labels and examples a step looks at, and how many it keeps."""

    method: str = "s2m-annealed"
    batch_size: int = 2048
    num_sampled_labels: int = 4096  # K-bar in the paper
    num_hard_labels: int = 64  # k; the paper's advice: the r of the recall@r one cares about
    num_hard_examples: int = 512  # k'; what the rarest subpopulation may fill of a batch
    tail_fraction: float = 0.0  # above 0: k' as a share of the batch, and not the number above
    anneal_fraction: float = 1.0  # part of the run over which k' shrinks, where it is annealed
    sampler: str = "uniform"
    sampler_power: float = 0.75  # frequency: labels are drawn by count ** power
    in_batch_share: float = 0.5  # mixed: part of the sample that is the batch's own labels
    for_each_example: bool = False  # a sample of its own for each example (slower)
    masks_all_positives: bool = True  # False: the paper's mask, the drawn positive alone
    whole_queries: bool = False  # the pairs of a query in one batch, so that it is scored once

    def __post_init__(self) -> None:
        check_choice("mining.method", self.method, tuple(METHODS))
        check_choice("mining.sampler", self.sampler, SAMPLERS)
        check_positive("mining", batch_size=self.batch_size)
        check_positive("mining", num_sampled_labels=self.num_sampled_labels)
        if self.draws_labels and not 1 <= self.num_hard_labels <= self.num_sampled_labels:
            raise UserError(
                f"mining.num_hard_labels must be between 1 and mining.num_sampled_labels "
                f"({self.num_sampled_labels}), got {self.num_hard_labels}"
            )
        if not -MAX_POWER <= self.sampler_power <= MAX_POWER:
            raise UserError(
                f"mining.sampler_power must be between -{MAX_POWER} and {MAX_POWER}, got "
                f"{self.sampler_power}"
            )
        if not 0 <= self.tail_fraction <= 1:
            raise UserError(
                f"mining.tail_fraction must be between 0 and 1, got {self.tail_fraction}"
            )
        is_a_number = self.mines_examples and not self.tail_fraction  # else it is not looked at
        if is_a_number and not 1 <= self.num_hard_examples <= self.batch_size:
            raise UserError(
                f"mining.num_hard_examples must be between 1 and mining.batch_size "
                f"({self.batch_size}), got {self.num_hard_examples}"
            )
        if not 0 <= self.anneal_fraction <= 1:
            raise UserError(
                f"mining.anneal_fraction must be between 0 and 1, got {self.anneal_fraction}"
            )
        if not 0 < self.in_batch_share < 1:
            raise UserError(
                f"mining.in_batch_share must be between 0 and 1, exclusive, "
                f"got {self.in_batch_share}"
            )
        self._check_in_batch()
        self._check_whole_queries()

    def _check_whole_queries(self) -> None:
        """Examples of one query share what is mined for it: that must be alike for all of them."""
        if not self.whole_queries:
            return
        for name, found, is_shared in (
            ("masks_all_positives", self.masks_all_positives, self.masks_all_positives),
            ("for_each_example", self.for_each_example, not self.for_each_example),
            ("sampler", self.sampler, self.sampler not in ("in-batch", "mixed")),
        ):
            if not is_shared:
                raise UserError(
                    f"mining.whole_queries needs the same negatives for all labels of a query, "
                    f"which mining.{name} = {toml_value(found)} does not give"
                )

    def _check_in_batch(self) -> None:
        """The batch's own labels, or the share of them in a mixed sample, must find room."""
        if not self.draws_labels or self.sampler not in ("in-batch", "mixed"):
            return
        num_slots = self.num_sampled_labels
        if self.sampler == "mixed":
            num_slots = round(self.in_batch_share * self.num_sampled_labels)
            if not 2 <= num_slots < self.num_sampled_labels:
                raise UserError(
                    f"mining.in_batch_share must give at least 2 of {self.num_sampled_labels} "
                    f"labels to the batch and leave one to draw, got {self.in_batch_share}"
                )
        if not 2 <= self.batch_size <= num_slots:
            raise UserError(
                f"mining.batch_size must be between 2 and {num_slots} (the labels of the sample "
                f"that mining.sampler = {self.sampler!r} takes from the batch), "
                f"got {self.batch_size}"
            )

    @property
    def draws_labels(self) -> bool:
        """Whether the method samples labels, or looks at them all."""
        return self.method not in WITH_ALL_LABELS

    @property
    def mines_examples(self) -> bool:
        return self.method in WITH_HARD_EXAMPLES

    @property
    def num_counting(self) -> int:
        """k', as a number, for every method: how many examples of a batch count in the end."""
        if self.method == "max":
            return 1
        if not self.mines_examples:
            return self.batch_size
        if self.tail_fraction:
            return max(1, math.ceil(self.tail_fraction * self.batch_size - 1e-9))
        return self.num_hard_examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskConfig:
    """How the examples of a batch are weighed, where the method asks for more than k'."""

    num_dropped: int = 32  # ranked-range: the hardest of a batch that do not count in the end
    window: int = 16  # cvar: batches by which the threshold is set
    step_size: float = 0.01  # group-dro, stochastic-max: of the weights, a step
    mixing: float = 0.5  # stochastic-max: share of the uniform distribution
    group: str = ""  # group-dro: the column whose groups are known
    natural_share: float = 0.0  # group-dro: part of every mixture that is as the data are

    def __post_init__(self) -> None:
        check_positive("risk", window=self.window, step_size=self.step_size, mixing=self.mixing)
        if self.num_dropped < 0:
            raise UserError(f"risk.num_dropped must be at least 0, got {self.num_dropped}")
        for name in ("mixing", "natural_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"risk.{name} must be between 0 and 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    num_steps: int = 1500
    learning_rate: float = 0.024
    learning_rate_shape: str = "linear"
    warmup_steps: int = 0
    optimizer: str = "row-adam"
    precision: str = "mixed"  # on a GPU; a CPU computes in float32 (see PRECISIONS)
    max_gradient_norm: float = 0.0  # 0: gradients are not clipped
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 0  # validate so often and keep the best weights; 0: keep the last
    checkpoint_every: int = 500  # 0: none, so that the run cannot be resumed
    keep_last: int = 2  # checkpoints: should the newest be damaged, the one before it is used
    keep_best: bool = False  # a checkpoint of the best validation too, beside its weights
    async_checkpoints: bool = True  # written while training goes on, from a copy in memory
    select_by: str = "recall@10"  # or "recall@10 on worst 3 of script", "mrr", ...
    patience: int = 0  # stop after so many validations without a new best; 0: never

    def __post_init__(self) -> None:
        check_choice("training.learning_rate_shape", self.learning_rate_shape, LEARNING_RATE_SHAPES)
        check_choice("training.optimizer", self.optimizer, OPTIMIZERS)
        check_choice("training.precision", self.precision, PRECISIONS)
        check_positive("training", num_steps=self.num_steps, learning_rate=self.learning_rate)
        check_positive("training", log_every=self.log_every, keep_last=self.keep_last)
        for name in (
            "warmup_steps", "max_gradient_norm", "seed",
            "evaluate_every", "checkpoint_every", "patience",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise UserError(f"training.{name} must be at least 0, got {getattr(self, name)}")
        if self.patience and not self.evaluate_every:
            raise UserError(
                f"training.patience counts validations, so it needs training.evaluate_every, "
                f"got {self.patience} and 0"
            )
        if self.seed >= 2**62:
            raise UserError(f"training.seed must be below 2**62, got {self.seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    cutoffs: tuple[int, ...] = (1, 5, 10, 25, 50)
    num_resamples: int = 1000  # of the bootstrap intervals
    # A group with fewer pairs than this is said to be too small to judge.
    min_pairs: dict[str, int] = dataclasses.field(default_factory=lambda: {"script": 100})

    def __post_init__(self) -> None:
        if not self.cutoffs or not 1 <= min(self.cutoffs) <= max(self.cutoffs) <= MAX_CUTOFF:
            raise UserError(
                f"evaluation.cutoffs must be between 1 and {MAX_CUTOFF}, got {list(self.cutoffs)}"
            )
        if self.num_resamples < 0:
            raise UserError(
                f"evaluation.num_resamples must be at least 0, got {self.num_resamples}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    mining: MiningConfig = dataclasses.field(default_factory=MiningConfig)
    risk: RiskConfig = dataclasses.field(default_factory=RiskConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    ranker: RankerConfig = dataclasses.field(default_factory=RankerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        is_plain_cosine = self.model.similarity == "cosine" and self.model.scale == 1
        if self.loss.name == "contrastive" and not is_plain_cosine:
            raise UserError(
                f'loss.name = "contrastive" is for cosines: it needs model.similarity = "cosine" '
                f'and model.scale = 1.0, got "{self.model.similarity}" and {self.model.scale}; '
                f'choose another loss, such as "softmax"'
            )
        room = self.mining.batch_size - self.mining.num_counting
        if self.mining.method == "ranked-range" and self.risk.num_dropped > room:
            raise UserError(
                f"risk.num_dropped must be at most {room} (mining.batch_size without the hard "
                f"examples), got {self.risk.num_dropped}"
            )
        if self.mining.method == "group-dro" and not self.risk.group:
            raise UserError(
                'mining.method = "group-dro" needs groups that are known: name their column, such '
                'as risk.group = "country"'
            )


SECTIONS: dict[str, type[Any]] = {
    field.name: typing.cast(type[Any], field.type) for field in dataclasses.fields(Config)
}


def preset_names() -> list[str]:
    """The configs that come with the package; `evenhand train` takes a name for a file."""
    files = resources.files("evenhand").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, dict[str, Any]]:
    """The sections of a preset."""
    file = resources.files("evenhand").joinpath("presets", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, unchecked."""
    try:
        return parsed_toml(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UserError(f"{path} is not valid TOML: {error}") from error


def with_assignments(
    settings: Mapping[str, Mapping[str, Any]], assignments: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Settings changed by `section.key=value` words, the value in TOML's notation."""
    changed = {section: _section(section, values) for section, values in settings.items()}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise UserError(f"--set takes section.key=value, got {assignment!r}")
        try:
            value = parsed_toml(f"value = {text}")["value"]
        except ValueError:  # TOMLDecodeError is one
            value = text  # a bare word is a string
        changed.setdefault(section, {})[key] = value
    return changed


def build_config(settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """Checks every section and key, and fills in the rest."""
    for section in settings:
        if section not in SECTIONS:
            raise UserError(f"there is no section [{section}]; {hint(section, SECTIONS)}")
    return Config(
        **{
            section: build(cls, settings.get(section, {}), section=section)
            for section, cls in SECTIONS.items()
        }
    )


def build(cls: type[T], values: Mapping[str, Any], *, section: str) -> T:
    """Builds a config dataclass from one TOML section, refusing keys it does not know."""
    values = _section(section, values)
    kinds = _kinds(cls)  # type: ignore[arg-type]
    for key in values:
        if key not in kinds:
            raise UserError(f"[{section}] has no setting {key!r}; {hint(key, kinds)}")
    return cls(
        **{key: typed(f"{section}.{key}", value, kinds[key]) for key, value in values.items()}
    )


@cache
def _kinds(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _section(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise UserError(
            f"{name} = {told(values)} stands outside of any section; settings belong below one of "
            f"{', '.join(f'[{section}]' for section in SECTIONS)}"
        )
    return dict(values)


def to_toml(config: Config) -> str:
    """Every setting, in a form that `build_config` reads back to an equal config."""
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        values = dataclasses.asdict(getattr(config, section))
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A value in TOML's notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        items = [f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(items)} }}"
    return repr(value)
