"""The search space, the trials that a seed gives, and the paper's heuristic for k'."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from evenhand.config import Config, build_config, parse_toml, toml_value
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation import group_columns
from evenhand.evaluation.scores import check_known
from evenhand.methods import METHODS

METHOD, NUM_STEPS = "mining.method", "training.num_steps"
NUM_HARD_EXAMPLES, NUM_HARD_LABELS = "mining.num_hard_examples", "mining.num_hard_labels"
ANNEAL_FRACTION, TAIL_FRACTION = "mining.anneal_fraction", "mining.tail_fraction"
LEARNING_RATE = "training.learning_rate"
SEARCHED_SECTIONS = ("model", "loss", "mining", "risk", "training")  # others change what is judged
BASELINES = ("snm", "sgd")
SHORT_NAMES = {
    METHOD: "method", NUM_HARD_EXAMPLES: "k'", NUM_HARD_LABELS: "k", LEARNING_RATE: "rate",
    NUM_STEPS: "steps", ANNEAL_FRACTION: "anneal",
}  # fmt: skip
NAN = float("nan")
MOST_DRAWS = 1000  # for a new trial, before the space counts as exhausted

Value = int | float | str
Settings = dict[str, Value]  # by "section.key"


class Choices(NamedTuple):
    """A few values, each as likely as another."""

    values: tuple[Value, ...]

    def at(self, share: float) -> Value:
        """The value at a share, from 0 to 1, of the list."""
        return self.values[int(share * len(self.values))]

    def __str__(self) -> str:
        """As `parse_space` reads it."""
        return ",".join(map(toml_value, self.values))


class Span(NamedTuple):
    """All numbers between two: on a scale of ratios, or of differences where 0 is among them."""

    low: int | float
    high: int | float

    def at(self, share: float) -> Value:
        """The value at a share, from 0 to 1, of the range."""
        if self.low > 0:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        short = round(value) if is_whole else float(f"{value:.3g}")  # for people to read
        return min(max(short, self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


Space = dict[str, Choices | Span]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial and, once it is run, its figures on the validation part."""

    number: int  # from 1
    role: str  # "SNM", "as given", or nothing
    settings: Settings  # the method, k' and all that is searched
    average: float = NAN  # NaN: it did not come to an end
    criterion: float = NAN
    low: float = NAN  # 95 % interval of the criterion
    high: float = NAN
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # head, tail, worst groups
    seconds: float = 0.0
    failure: str = ""  # why there are no figures

    @property
    def num_hard_examples(self) -> int:
        return int(self.settings[NUM_HARD_EXAMPLES])

    @property
    def is_scored(self) -> bool:
        """Whether both figures exist; a trial that diverged has none."""
        return not math.isnan(self.average) and not math.isnan(self.criterion)


# --- what is searched -----------------------------------------------------------------------------


def default_space(config: Config, *, advised: int | None = None) -> Space:
    """k', k, learning rate, steps and schedule around a config, as far as its method uses them.

    Args:
        advised: the k' of a smallest group: half of it, it, and in equal ratios up to the batch,
            because so few examples may teach too little. If not given, k' is a sixteenth, an
            eighth, a quarter, a half or the whole of the batch.
    """

    def whole_numbers(numbers: Sequence[float], most: float = math.inf) -> Choices:
        return Choices(tuple(sorted({max(1, round(min(number, most))) for number in numbers})))

    mining, training = config.mining, config.training
    space: Space = {}
    if mining.mines_examples:
        num_dropped = config.risk.num_dropped if METHODS[mining.method].drops_hardest else 0
        sizes = [mining.batch_size / part for part in (16, 8, 4, 2, 1)]
        if advised is not None:
            ratio = mining.batch_size / advised
            sizes = [advised / 2, *(advised * ratio ** (part / 3) for part in range(4))]
        space[NUM_HARD_EXAMPLES] = whole_numbers(sizes, most=mining.batch_size - num_dropped)
    if mining.draws_labels:
        around = [mining.num_hard_labels * factor for factor in (1 / 4, 1, 4)]
        space[NUM_HARD_LABELS] = whole_numbers(around, most=mining.num_sampled_labels)
    space[LEARNING_RATE] = Span(training.learning_rate / 2, training.learning_rate * 2)
    space[NUM_STEPS] = whole_numbers([training.num_steps / 2, training.num_steps])
    if mining.is_annealed:
        space[ANNEAL_FRACTION] = Choices((0.0, 0.5, 1.0))
    return space


def parse_space(words: Sequence[str], config: Config) -> Space:
    """The space of words such as `training.learning_rate=0.01..0.04` and `loss.margin=0.2,0.3`."""
    space: Space = {}
    for word in words:
        name, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals or not text:
            raise UserError(f"--search takes section.key=1,2,3 or section.key=1..3, got {word!r}")
        if name in space:
            raise UserError(f"--search {name} is given twice; list all its values in one")
        if name.partition(".")[0] not in SEARCHED_SECTIONS or name == TAIL_FRACTION:
            raise UserError(
                f"--search takes settings of {', '.join(SEARCHED_SECTIONS)}, and k' as "
                f"{NUM_HARD_EXAMPLES}, got {name!r}"
            )
        low, is_span, high = text.partition("..")
        values: list[Value] = []
        for item in map(str.strip, (low, high) if is_span else text.split(",")):
            try:
                value = parse_toml(f"value = {item}")["value"]
            except ValueError:  # a bare word
                value = item
            is_list = isinstance(value, str) and ("," in value or ".." in value)  # by an escape
            if is_list or isinstance(value, bool) or not isinstance(value, int | float | str):
                raise UserError(f"--search {name} takes numbers or words, got {item!r}")
            # As its setting has it; one that the setting cannot have is refused.
            values.append(get_setting(with_settings(config, {name: value}), name))
        numbers = [value for value in values if not isinstance(value, str)]
        if is_span and (len(numbers) != 2 or numbers[0] >= numbers[1]):
            raise UserError(f"--search {name} needs two numbers, the lower one first, got {text!r}")
        space[name] = Span(*numbers) if is_span else Choices(tuple(dict.fromkeys(values)))
    mining = config.mining
    is_used = {NUM_HARD_EXAMPLES: mining.mines_examples, NUM_HARD_LABELS: mining.draws_labels}
    is_used[ANNEAL_FRACTION] = mining.is_annealed
    for name in space:
        if METHOD not in space and not is_used.get(name, True):
            raise UserError(
                f"{name} changes nothing with {METHOD} = {mining.method!r}; choose another "
                f"method, such as --method s2m-annealed, or do not search it"
            )
    return space


# --- settings of a trial --------------------------------------------------------------------------


def with_settings(config: Config, settings: Mapping[str, Value]) -> Config:
    """The config with some settings changed, checked as a whole.

    A number of hard examples takes the place of a share of the batch, if the config has one.
    """
    sections = dataclasses.asdict(config)
    if NUM_HARD_EXAMPLES in settings:
        sections["mining"]["tail_fraction"] = 0.0
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return build_config(sections)


def get_setting(config: Config, name: str) -> Any:
    """A setting by its full name: "mining.batch_size"."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def format_settings(trials: Sequence[Settings]) -> list[dict[str, str]]:
    """For each trial, k' and what else differs between them, under short names, for people."""
    num_values = {name: len({trial[name] for trial in trials}) for name in trials[0]}
    num_values[METHOD] = len({trial[METHOD] for trial in trials}.difference(BASELINES))
    names = [name for name, number in num_values.items() if number > 1]
    shown = []
    for trial in trials:
        row = {name: str(trial[name]) for name in dict.fromkeys((NUM_HARD_EXAMPLES, *names))}
        if trial[METHOD] in BASELINES:  # which look at neither
            row |= {NUM_HARD_EXAMPLES: "all"}
            row |= {ANNEAL_FRACTION: "–"} if ANNEAL_FRACTION in names else {}
        shown.append({SHORT_NAMES.get(name, name): value for name, value in row.items()})
    return shown


# --- the trials -----------------------------------------------------------------------------------


def plan_trials(config: Config, space: Space, *, num_trials: int, seed: int) -> list[Trial]:
    """The baseline, the config as given, then points that fill the space evenly; none twice.

    The same seed gives the same trials, and more trials begin with those of fewer. There are
    fewer than `num_trials` where the space does not hold as many.
    """
    names = [METHOD, NUM_HARD_EXAMPLES, *(n for n in space if n not in (METHOD, NUM_HARD_EXAMPLES))]
    as_given: Settings = {name: get_setting(config, name) for name in names}
    as_given[NUM_HARD_EXAMPLES] = config.mining.num_counting
    baseline = "snm" if config.mining.draws_labels else "sgd"
    everyone: Settings = {METHOD: baseline, NUM_HARD_EXAMPLES: config.mining.batch_size}
    trials: list[Trial] = []

    def add(role: str, settings: Settings) -> None:
        """Adds a trial unless one means the same: k' = the batch is the baseline method."""
        mining = with_settings(config, settings).mining  # refused here, if it is impossible
        method, num_hard_examples = mining.method, mining.num_counting
        if num_hard_examples == mining.batch_size:
            method = METHODS[method].at_whole_batch or method
        settings = settings | {METHOD: method, NUM_HARD_EXAMPLES: num_hard_examples}
        if ANNEAL_FRACTION in settings and not METHODS[method].is_annealed:
            settings[ANNEAL_FRACTION] = config.mining.anneal_fraction
        if all(settings != trial.settings for trial in trials):
            trials.append(Trial(number=len(trials) + 1, role=role, settings=settings))

    add(baseline.upper(), as_given | everyone)
    add("as given", as_given)
    drawn: list[Settings] = []
    for point in _even_points(len(space), seed=seed, num_points=MOST_DRAWS * num_trials):
        if len(trials) >= num_trials:
            break
        axes = zip(space.items(), point, strict=True)
        chosen: Settings = {name: axis.at(share) for (name, axis), share in axes}
        if chosen not in drawn:
            drawn.append(chosen)
            add("", as_given | chosen)
    return trials


def _even_points(num_dimensions: int, *, seed: int, num_points: int) -> Iterator[list[float]]:
    """Quasi-random points that fill the unit cube evenly, however many are taken.

    An additive recurrence: point n is (start + n * steps) modulo 1, where the steps are the powers
    of 1 / x and x solves x ** (d + 1) = x + 1, which is the golden ratio for d = 1. Written out,
    because it is a line, and because every version of scipy names the seed of its own differently.
    """
    root = 2.0
    for _ in range(64):  # the equation, solved for x, draws every number to its solution
        root = (1 + root) ** (1 / (num_dimensions + 1))
    steps = root ** -np.arange(1.0, num_dimensions + 1)  # (d,)
    start = np.random.default_rng(seed).random(num_dimensions)
    for number in range(1, num_points + 1):
        yield ((start + number * steps) % 1).tolist()


# --- the smallest group ---------------------------------------------------------------------------


def num_hard_examples_for(share: float, *, batch_size: int) -> int:
    """Number of examples of a batch that a group with this share of the data is expected to fill.

    Example:
        >>> num_hard_examples_for(0.02, batch_size=2048)
        41
    """
    if not 0 < share <= 1:
        raise UserError(f"the smallest share must be above 0 and at most 1, got {share}")
    return math.ceil(share * batch_size * (1 - 1e-12))  # 0.07 * 100 is a little more than 7


def count_members(dataset: Dataset, name: str) -> tuple[int, int]:
    """Training pairs of a group, such as 'script=THAI', of queries or labels; and of all."""
    column_name, equals, group = (piece.strip() for piece in name.partition("="))
    if not equals:
        raise UserError(f"a group is named column=group, such as script=THAI, got {name!r}")
    columns = {column.name: column for column in group_columns(dataset, "train")}
    check_known(column_name, list(columns), f"column of {name!r}")
    column = columns[column_name]
    check_known(group, column.group_names, f"group of {name!r}")
    num_members = len(column.pairs_of(group))
    if not num_members:
        raise UserError(f"{name!r} has no training pair in {dataset.name}, so it has no share")
    return num_members, len(column.groups.ids)


def build_guarding_config(
    config: Config, dataset: Dataset, smallest: float | str, console: Console
) -> Config:
    """The config with the k' that fits the smallest group, given by share or by name."""
    mining = config.mining
    if isinstance(smallest, str):
        num_members, num_pairs = count_members(dataset, smallest)
        console.print(f"{smallest}: {num_members:,} of {num_pairs:,} training pairs")
        smallest = num_members / num_pairs
    if not mining.mines_examples:
        raise UserError(
            f"a smallest group sets k', which mining.method = {mining.method!r} has no use for; "
            f"choose another method, such as --method s2m-annealed"
        )
    num_hard_examples = num_hard_examples_for(smallest, batch_size=mining.batch_size)
    console.print(
        f"k' = {num_hard_examples:,}, what a share of {smallest:.2%} is expected to fill of a "
        f"batch of {mining.batch_size:,}"
    )
    return with_settings(config, {NUM_HARD_EXAMPLES: num_hard_examples})
