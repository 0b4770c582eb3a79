"""Settings: TOML files and flags, read strictly, written out in full into the run folder."""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import evenhand.losses as losses
from evenhand.data.weighting import WEIGHTINGS
from evenhand.errors import UserError
from evenhand.files import read_text
from evenhand.methods import DROPPED, METHODS, Method

T = TypeVar("T")

MARGIN_LOSSES = {
    "hinge": losses.hinge,
    "squared-hinge": losses.squared_hinge,
    "logistic": losses.logistic,
    "exponential": losses.exponential,
}
LOSSES = ("contrastive", "softmax", "bowl", "crammer-singer", "averaged")
SAMPLERS = ("uniform", "frequency", "in-batch", "mixed")
# Tables and products: both float32; float32 and bfloat16; both bfloat16, rows rounded by chance.
PRECISIONS = ("float32", "mixed", "bfloat16")
OPTIMIZERS = ("row-adam", "row-adagrad")
LEARNING_RATE_SHAPES = ("linear", "cosine", "constant")
MAX_CUTOFF = 10**6  # results of a query that are looked at
MAX_POWER = 10  # of counts, by which labels are drawn: beyond it, only the most frequent ones are
MAX_DOTS = 1000  # in a line of TOML
FORMER = {
    "training.async_checkpoints",
    "risk.mixing",
}  # settings that are gone, and still stand in old runs

# --- checks of one setting ------------------------------------------------------------------------


def check_choice(
    name: str, value: str, choices: Sequence[str], dropped: Mapping[str, str] | None = None
) -> None:
    """Refuses a value that is none of the choices; `dropped` says what to use instead of which."""
    if dropped and value in dropped:
        raise UserError(f"{name} = {value!r} is no longer there: use {dropped[value]}")
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise UserError(f"{name} must be above 0, got {value}")


def check_range(
    name: str, value: float, low: float, high: float = math.inf, *, high_name: str = "{}"
) -> None:
    """Refuses a value outside of [low, high]; `high_name` says what the upper end is."""
    if not low <= value <= high:
        to_high = f"between {low} and {high_name.format(high)}"
        wanted = f"at least {low}" if high == math.inf else to_high
        raise UserError(f"{name} must be {wanted}, got {value}")


# Types that carry the checks of their values.
Count = Annotated[int, check_positive]
CountOrNone = Annotated[int, partial(check_range, low=0)]  # 0: none
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, partial(check_range, low=0)]
Share = Annotated[float, partial(check_range, low=0, high=1)]


@cache
def _type_hints(cls: Any, *, include_extras: bool = False) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=include_extras)


# --- the sections ---------------------------------------------------------------------------------


class Section:
    """Applies the checks of the types of its fields; `MiningConfig` is the section "mining"."""

    def __post_init__(self) -> None:
        self.check(vars(self))

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> None:
        """Refuses a value that its setting cannot have, whatever the others are."""
        section = cls.__name__.removesuffix("Config").lower()
        for key, kind in _type_hints(cls, include_extras=True).items():  # type: ignore[arg-type]
            for check_fn in getattr(kind, "__metadata__", ()) if key in values else ():
                check_fn(f"{section}.{key}", values[key])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What to train on: `places`, or the folder of a data set made by `evenhand data`."""

    dataset: str = "places"  # or a folder
    min_population: int = 15000  # of the cities in `places`: 500, 1000, 5000 or 15000
    # n-grams of a name are hashed into so many features
    num_buckets: Annotated[int, partial(check_range, low=1, high=2**31 - 1)] = 2**18
    # of the values of sparse features; unit: every query of length 1; tf-idf: that, and rare ones
    # count more; standard: of dense ones, each column less its mean and over its deviation
    weighting: Annotated[str, partial(check_choice, choices=WEIGHTINGS)] = "as-is"

    @property
    def folder(self) -> Path:
        """Where the data set lies; `places` is prepared there once."""
        if self.dataset != "places":
            return Path(self.dataset)
        return Path("datasets") / f"places-{self.min_population}-{self.num_buckets}"


OWN = "own"  # the encoder is a module given in Python


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    # of the queries: a folder of transformers or sentence-transformers; "": a bag of sparse
    # features, or a perceptron for dense ones; "own": a module given in Python
    encoder: str = ""
    # what it takes: features of the queries, or their texts
    input: Annotated[str, partial(check_choice, choices=("features", "texts"))] = "features"
    init_from: str = ""  # a run folder: training begins with its weights
    freeze_encoder: bool = False  # train a perceptron over its vectors, computed once
    # what the vector of a label is: "table": numbers of its own; "tower": what an encoder makes of
    # its name and text, so that new labels need no training; "both": the sum
    labels: Annotated[str, partial(check_choice, choices=("table", "tower", "both"))] = "table"
    # that encoder: the one of the queries, or one of the same kind with weights of its own
    label_tower: Annotated[str, partial(check_choice, choices=("shared", "own"))] = "shared"
    embedding_dim: Count = 256  # numbers in the vector of a query or a label
    # of a query's and a label's vector; dot: with their lengths
    similarity: Annotated[str, partial(check_choice, choices=("cosine", "dot"))] = "cosine"
    scale: Positive = 1.0  # of the scores
    label_bias: bool = False  # a number a label that is added to its scores; only with "dot"
    hidden_widths: tuple[int, ...] = ()  # of the perceptron for dense features, or frozen vectors

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.hidden_widths:
            check_positive("model.hidden_widths", width)
        if self.label_bias and self.similarity == "cosine":
            raise UserError('model.label_bias goes with model.similarity = "dot"')
        if self.encoder not in ("", OWN) and self.input != "texts":
            raise UserError(f'model.encoder = "{self.encoder}" needs model.input = "texts"')
        if self.input == "texts" and not self.encoder:
            raise UserError('model.input = "texts" needs a model.encoder that reads them')
        if self.freeze_encoder and self.input != "texts":
            raise UserError('model.freeze_encoder needs a model.encoder and model.input = "texts"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    # of an example's positive against its negatives
    name: Annotated[str, partial(check_choice, choices=LOSSES)] = "contrastive"
    # contrastive: negatives cost above it
    margin: Annotated[float, partial(check_range, low=-1, high=1)] = losses.CONTRASTIVE_MARGIN
    # contrastive: of what a negative costs; the paper has 2
    power: Annotated[float, partial(check_range, low=1)] = 1.0
    # bowl, crammer-singer, averaged: of a margin
    margin_loss: Annotated[str, partial(check_choice, choices=tuple(MARGIN_LOSSES))] = "hinge"
    log_q: bool = False  # softmax: correct for how often a label is drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_q and self.name != "softmax":
            raise UserError(f'loss.log_q is for loss.name = "softmax" alone, got "{self.name}"')

    def build(self) -> losses.LossFn:
        """Returns the loss as a function of the (B,) positive and (B, k) negative scores."""
        if self.name == "contrastive":
            return partial(losses.contrastive_loss, margin=self.margin, power=self.power)
        if self.name == "softmax":
            return losses.softmax_loss
        by_margin = {
            "bowl": losses.bowl_loss,
            "crammer-singer": losses.crammer_singer_loss,
            "averaged": losses.averaged_loss,
        }
        return partial(by_margin[self.name], margin_loss=MARGIN_LOSSES[self.margin_loss])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningConfig(Section):
    """How many labels and examples a step looks at, and how many it keeps."""

    # which labels and which examples count; docs/methods.md describes them
    method: Annotated[str, partial(check_choice, choices=tuple(METHODS), dropped=DROPPED)] = (
        "s2m-annealed"
    )
    batch_size: Count = 2048  # examples in a step
    num_sampled_labels: Count = 4096  # labels drawn in a step; K-bar in the paper
    num_hard_labels: int = 64  # k; the paper's advice: the r of the recall@r one cares about
    num_hard_examples: int = 512  # k'; what the rarest subpopulation may fill of a batch
    tail_fraction: Share = 0.0  # above 0: k' as a share of the batch, and not the number above
    anneal_fraction: Share = 1.0  # part of the run over which k' shrinks, where it is annealed
    # of encoders that are not one row a feature: k' is so large that the mean of the hardest losses
    # is at most this part of the loss of a model that tells no labels apart, which they collapse
    # to where more is mined than they can learn; 0: k' as it is
    loss_ceiling: Share = 0.7
    # how labels are drawn; mixed: from the batch, and uniformly
    sampler: Annotated[
        str, partial(check_choice, choices=SAMPLERS, dropped={"log-uniform": '"frequency"'})
    ] = "uniform"
    # frequency: labels are drawn by count ** power
    sampler_power: Annotated[float, partial(check_range, low=-MAX_POWER, high=MAX_POWER)] = 0.75
    in_batch_share: float = 0.5  # mixed: part of the sample that is the batch's own labels
    for_each_example: bool = False  # a sample of its own for each example (slower)
    # steps after which the vectors of all labels that a tower reads are computed again, to be mined
    refresh_every: Count = 100
    masks_all_positives: bool = True  # as negatives of a query; false: the drawn one alone (paper)
    whole_queries: bool = False  # the pairs of a query in one batch, so that it is scored once

    def __post_init__(self) -> None:
        super().__post_init__()
        share, num_slots = self.in_batch_share, self.num_sampled_labels
        if self.draws_labels:
            name = "mining.num_sampled_labels ({})"
            check_range(
                "mining.num_hard_labels", self.num_hard_labels, 1, num_slots, high_name=name
            )
        if self.mines_examples and not self.tail_fraction:  # else the number is not read
            most, name = self.batch_size, "mining.batch_size ({})"
            check_range("mining.num_hard_examples", self.num_hard_examples, 1, most, high_name=name)
        if not 0 < share < 1:
            raise UserError(
                f"mining.in_batch_share must be between 0 and 1, exclusive, got {share}"
            )
        if self.draws_labels and self.sampler in ("in-batch", "mixed"):
            # The batch's own labels, or the share of them in a mixed sample, must find room.
            if self.sampler == "mixed":
                num_slots = round(share * self.num_sampled_labels)
                if not 2 <= num_slots < self.num_sampled_labels:
                    raise UserError(
                        f"mining.in_batch_share must give at least 2 of {self.num_sampled_labels} "
                        f"labels to the batch and leave one to draw, got {share}"
                    )
            name = f"{{}} (the labels of the sample that mining.sampler = {self.sampler!r} takes "
            name += "from the batch)"
            check_range("mining.batch_size", self.batch_size, 2, num_slots, high_name=name)
        # Examples of one query share what is mined for it: that must be alike for all of them.
        for name, found, is_shared in (
            ("masks_all_positives", self.masks_all_positives, self.masks_all_positives),
            ("for_each_example", self.for_each_example, not self.for_each_example),
            ("sampler", self.sampler, self.sampler not in ("in-batch", "mixed")),
        ):
            if self.whole_queries and not is_shared:
                raise UserError(
                    f"mining.whole_queries needs the same negatives for all labels of a query, "
                    f"which mining.{name} = {toml_value(found)} does not give"
                )

    @property
    def _method(self) -> Method:
        return METHODS[self.method]

    @property
    def draws_labels(self) -> bool:
        """Whether the method samples labels, or looks at them all."""
        return self._method.samples_labels

    @property
    def mines_examples(self) -> bool:
        """Whether the method has a k'."""
        return self._method.mines_examples

    @property
    def is_annealed(self) -> bool:
        """Whether k' shrinks from the whole batch."""
        return self._method.is_annealed

    @property
    def num_counting(self) -> int:
        """k', as a number, for every method: how many examples of a batch count in the end."""
        if not self.mines_examples:
            return self.batch_size
        if self.tail_fraction:
            return max(1, math.ceil(self.tail_fraction * self.batch_size - 1e-9))
        return self.num_hard_examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskConfig(Section):
    """How the examples of a batch are weighed, where the method asks for more than k'."""

    # ranked-range, even-range: hardest of a batch that do not count in the end
    num_dropped: CountOrNone = 32
    window: Count = 16  # cvar: batches by which the threshold is set
    step_size: Positive = 0.01  # group-dro: by which the weights change
    group: str = ""  # group-dro: the column whose groups are known; s2m-even: bins by its groups
    # s2m-even: training queries whose losses show the generalisation gap, and that teach nothing
    held_out_share: Annotated[float, partial(check_range, low=0, high=0.5)] = 0.005
    gap_scale: NotNegative = 0.27  # s2m-even, where none are held out: the gap times sqrt(pairs)
    gap_weight: NotNegative = 0.75  # s2m-even: times the gap is added to a loss
    mined_share: Share = 0.5  # s2m-even: of the weight, to the hardest examples; the rest to all
    natural_share: Share = 0.0  # group-dro: part of every mixture that is as the data are


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    num_steps: Count = 1500  # batches
    learning_rate: Positive = 0.024  # the highest
    # that of a dense encoder's weights, by AdamW with a weight decay of 0.01; 0: the same, by Adam
    encoder_learning_rate: NotNegative = 0.0
    # how the rate falls after the warm-up
    learning_rate_shape: Annotated[str, partial(check_choice, choices=LEARNING_RATE_SHAPES)] = (
        "linear"
    )
    warmup_steps: CountOrNone = 0  # over which the rate rises
    # row-adam: with momentum; row-adagrad: without, in half the memory
    optimizer: Annotated[str, partial(check_choice, choices=OPTIMIZERS)] = "row-adam"
    # on a GPU; a CPU computes in float32
    precision: Annotated[str, partial(check_choice, choices=PRECISIONS)] = "mixed"
    max_gradient_norm: NotNegative = 0.0  # 0: gradients are not clipped
    # examples that a dense encoder encodes at once, whatever the batch; 0: all of it
    chunk_size: CountOrNone = 0
    seed: CountOrNone = 0  # of everything random
    log_every: Count = 50  # steps
    evaluate_every: CountOrNone = 0  # validate so often and keep the best weights; 0: keep the last
    checkpoint_every: CountOrNone = 500  # steps; 0: none, so that the run cannot be resumed
    keep_last: Count = 2  # checkpoints: should the newest be damaged, the one before it is used
    keep_best: bool = False  # a checkpoint of the best validation too, beside its weights
    # what is best in validation; or "recall@10 on worst 3 of script", "mrr", ...
    select_by: str = "recall@10"
    patience: CountOrNone = 0  # stop after so many validations without a new best; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and not self.evaluate_every:
            raise UserError(
                f"training.patience counts validations, so it needs training.evaluate_every, "
                f"got {self.patience} and 0"
            )
        if self.seed >= 2**62:
            raise UserError(f"training.seed must be below 2**62, got {self.seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig(Section):
    """What is added to the model's scores: votes of similar training queries, and a handicap.

    A model gives frequent labels high scores because they are frequent, which is right for the
    first label of a list and wrong for the rare ones (Menon et al., Long-tail learning via logit
    adjustment, 2021).
    """

    frequency_discount: NotNegative = 0.0  # times log(1 + a label's training pairs), off its score
    num_neighbours: CountOrNone = 0  # most similar training queries that vote; 0: none
    neighbour_weight: NotNegative = 5.0  # what the votes of all neighbours together add to a score
    neighbour_power: NotNegative = 4.0  # a neighbour counts by its similarity to this power


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(Section):
    """A linear classifier a label, fitted after training on the labels that are hardest then."""

    num_mined_labels: CountOrNone = 0  # hardest labels of each training query; 0: no ranker
    positive_cost: Positive = 0.5  # of a loss where the label is right; higher fits more closely
    negative_cost: Positive = 0.2  # of a loss where the label is wrong
    smallest_weight: NotNegative = 0.01  # weights below it are dropped
    weight: NotNegative = 12.0  # what a score of 1 of the ranker adds to the model's
    num_candidates: Count = 200  # the first labels of the model, and no others, are ranked


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    cutoffs: tuple[int, ...] = (1, 5, 10, 25, 50)  # of recall, precision and nDCG
    num_resamples: CountOrNone = 1000  # of the queries, for the bootstrap intervals
    # by group column: a group with fewer pairs is said to be too small to judge
    min_pairs: dict[str, int] = dataclasses.field(default_factory=lambda: {"script": 100})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cutoffs or not 1 <= min(self.cutoffs) <= max(self.cutoffs) <= MAX_CUTOFF:
            raise UserError(
                f"evaluation.cutoffs must be between 1 and {MAX_CUTOFF}, got {list(self.cutoffs)}"
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
        for name, count in (
            ("search.num_neighbours", self.search.num_neighbours),
            ("ranker.num_mined_labels", self.ranker.num_mined_labels),
        ):
            if count and self.model.input == "texts":
                raise UserError(
                    f'{name} is for sparse features, and model.input is "texts"; set it to 0'
                )
        method = METHODS[self.mining.method]
        room = self.mining.batch_size - self.mining.num_counting
        if method.drops_hardest and self.risk.num_dropped > room:
            raise UserError(
                f"risk.num_dropped must be at most {room} (mining.batch_size without the hard "
                f"examples), got {self.risk.num_dropped}"
            )
        if method.needs_groups and not self.risk.group:
            raise UserError(
                f'mining.method = "{self.mining.method}" needs groups that are known: name their '
                f'column, such as risk.group = "country"'
            )


SECTIONS: dict[str, type[Any]] = {
    field.name: typing.cast(type[Any], field.type) for field in dataclasses.fields(Config)
}

# --- reading --------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """The configs that come with the package; `evenhand train` takes a name for a file."""
    files = resources.files("evenhand").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, dict[str, Any]]:
    """The sections of a preset."""
    if name not in preset_names():
        known = ", ".join(preset_names())
        raise UserError(f"{name!r} is no preset and no file; the presets are {known}")
    file = resources.files("evenhand").joinpath("presets", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, unchecked."""
    try:
        return parse_toml(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UserError(f"{path} is not valid TOML: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The sections of a TOML text; one that is wrong, or that no one writes, is a `ValueError`."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MAX_DOTS:  # a key of so many parts takes the square of their number
            raise ValueError(f"line {number} has more than {MAX_DOTS} dots")
    if text.count(".") > 10 * MAX_DOTS:
        raise ValueError(f"it has more than {10 * MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def with_assignments(
    settings: Mapping[str, Mapping[str, Any]], assignments: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Settings changed by `section.key=value` words, the value in TOML's notation."""
    changed = {section: _section(section, values) for section, values in settings.items()}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise UserError(f"--set takes section.key=value, got {assignment!r}")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:  # TOMLDecodeError is one
            value = text  # a bare word is a string
        changed.setdefault(section, {})[key] = value
    return changed


def check_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every section with the settings that are given, each checked alone and of its own type."""
    for section in settings:
        if section not in SECTIONS:
            raise UserError(f"there is no section [{section}]; {_suggest(section, SECTIONS)}")
    return {
        section: _typed(cls, settings.get(section, {}), section=section)
        for section, cls in SECTIONS.items()
    }


def build_config(settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """Checks every section and key, and fills in the rest."""
    sections = check_settings(settings)
    return Config(**{name: cls(**sections[name]) for name, cls in SECTIONS.items()})


def build(cls: type[T], values: Mapping[str, Any], *, section: str) -> T:
    """Builds a config dataclass from one TOML section, refusing keys it does not know."""
    return cls(**_typed(cls, values, section=section))


def _typed(cls: Any, values: Mapping[str, Any], *, section: str) -> dict[str, Any]:
    values, kinds = _section(section, values), _type_hints(cls)
    values = {key: value for key, value in values.items() if f"{section}.{key}" not in FORMER}
    for key in values:
        if key not in kinds:
            raise UserError(f"[{section}] has no setting {key!r}; {_suggest(key, kinds)}")
    typed = {key: to_type(f"{section}.{key}", value, kinds[key]) for key, value in values.items()}
    for key, value in typed.items():
        if toml_value(value).count(".") > MAX_DOTS:  # `parse_toml` could not read it back
            raise UserError(f"{section}.{key} has more than {MAX_DOTS} dots")
    if issubclass(cls, Section):
        cls.check(typed)
    return typed


def _section(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise UserError(
            f"{name} = {format_value(values)} stands outside of any section; settings belong below "
            f"one of {', '.join(f'[{section}]' for section in SECTIONS)}"
        )
    return dict(values)


def _suggest(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def to_type(name: str, value: Any, kind: Any) -> Any:
    """The value as the type of its setting, where nothing is lost by it; else a `UserError`."""
    plain = typing.get_origin(kind) or kind
    if isinstance(value, int) and abs(value) >= 2**63:  # as in every other reader of TOML
        raise UserError(f"{name} must be a finite number below 2**63, got {format_value(value)}")
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if plain is tuple and isinstance(value, list):
        inner = typing.get_args(kind)[0]
        return tuple(to_type(name, item, inner) for item in value)
    if plain is dict and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return {
            to_type(name, key, str): to_type(f"{name}.{key}", item, inner)
            for key, item in value.items()
        }
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        is_plain = isinstance(kind, type | types.GenericAlias)
        wanted = plain.__name__ if is_plain else str(kind)
        raise UserError(f"{name} must be of type {wanted}, got {format_value(value)}")
    # Half a surrogate pair is what bytes become that are no UTF-8 on a command line.
    if plain is str and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"{name} must be UTF-8 text, got {value!r}; rename what it names")
    if plain is float and not abs(value) < float("inf"):
        raise UserError(f"{name} must be a finite number, got {value}")
    return value


def format_value(value: Any) -> str:
    """A value from a file, fit for a message; Python writes no number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    try:
        words = repr(value)
    except ValueError:  # such a number somewhere inside
        words = f"a {type(value).__name__}"
    return words if len(words) <= 200 else f"{words[:200]}..."


# --- writing --------------------------------------------------------------------------------------


def to_toml(config: Config, reasons: Mapping[str, str] | None = None) -> str:
    """Every setting, in a form that `build_config` reads back to an equal config.

    Args:
        reasons: by "section.key", comments on values.
    """
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for key, value in dataclasses.asdict(getattr(config, section)).items():
            reason = (reasons or {}).get(f"{section}.{key}")
            lines.append(f"{key} = {toml_value(value)}" + (f"  # {reason}" if reason else ""))
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
