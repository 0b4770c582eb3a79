"""What is searched, and which trials a seed gives."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.config import Config, build_config, parse_toml, toml_value
from evenhand.errors import UserError
from evenhand.methods import METHODS

METHOD, BATCH_SIZE = "mining.method", "mining.batch_size"
NUM_HARD_EXAMPLES, NUM_HARD_LABELS = "mining.num_hard_examples", "mining.num_hard_labels"
ANNEAL_FRACTION, TAIL_FRACTION = "mining.anneal_fraction", "mining.tail_fraction"
LEARNING_RATE, NUM_STEPS = "training.learning_rate", "training.num_steps"
SEARCHED_SECTIONS = (
    "model",
    "loss",
    "mining",
    "risk",
    "training",
)  # others would change what is judged
SHORT_NAMES = {
    METHOD: "method",
    NUM_HARD_EXAMPLES: "k'",
    NUM_HARD_LABELS: "k",
    LEARNING_RATE: "rate",
    NUM_STEPS: "steps",
    ANNEAL_FRACTION: "anneal",
}
PLAIN_WORD = re.compile("[A-Za-z][A-Za-z0-9_-]*")
TOML_WORDS = ("true", "false", "inf", "nan")
MOST_DRAWS = 1000  # of a trial that is not there yet, before the space is said to hold no more

Value = int | float | str
Settings = dict[str, Value]  # by "section.key"


class Choices(NamedTuple):
    """A few values, each as likely as another."""

    values: tuple[Value, ...]

    def at(self, share: float) -> Value:
        return self.values[int(share * len(self.values))]

    def __str__(self) -> str:
        """As `parsed_space` reads it."""
        return ",".join(map(_written, self.values))


class Span(NamedTuple):
    """All numbers between two: on a scale of ratios, or of differences where 0 is among them."""

    low: int | float
    high: int | float

    def at(self, share: float) -> Value:
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


class Planned(NamedTuple):
    """A trial to run."""

    role: str  # "SNM", "as given", or nothing
    settings: Settings  # the method, k' and all that is searched


# --- what is searched -----------------------------------------------------------------------------


def default_space(config: Config, *, advised: int | None = None) -> Space:
    """k', k, learning rate, steps and schedule around a config, where its method has use of them.

    Args:
        advised: the k' of a smallest group: half of it, it, and in equal ratios up to the batch,
            because so few examples may teach too little. If not given, k' is a sixteenth, an
            eighth, a quarter, a half or the whole of the batch.
    """
    mining, training = config.mining, config.training
    space: Space = {}
    if mining.mines_examples:
        room = mining.batch_size
        if mining.method == "ranked-range":
            room -= config.risk.num_dropped
        sizes = [mining.batch_size / part for part in (16, 8, 4, 2, 1)]
        if advised is not None:
            ratio = mining.batch_size / advised
            sizes = [advised / 2, *(advised * ratio ** (part / 3) for part in range(4))]
        space[NUM_HARD_EXAMPLES] = _whole(sizes, most=room)
    if mining.draws_labels:
        around = [mining.num_hard_labels * factor for factor in (1 / 4, 1, 4)]
        space[NUM_HARD_LABELS] = _whole(around, most=mining.num_sampled_labels)
    space[LEARNING_RATE] = Span(training.learning_rate / 2, training.learning_rate * 2)
    space[NUM_STEPS] = _whole([training.num_steps / 2, training.num_steps])
    if mining.is_annealed:
        space[ANNEAL_FRACTION] = Choices((0.0, 0.5, 1.0))
    return space


def _whole(numbers: Sequence[float], *, most: float = math.inf) -> Choices:
    return Choices(tuple(sorted({max(1, round(min(number, most))) for number in numbers})))


def parsed_space(words: Sequence[str], config: Config) -> Space:
    """The space of words such as `training.learning_rate=0.01..0.04` and `loss.margin=0.2,0.3`."""
    space: Space = {}
    for word in words:
        name, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals or not text:
            raise UserError(f"--search takes section.key=1,2,3 or section.key=1..3, got {word!r}")
        if name in space:
            raise UserError(f"--search {name} is given twice; list all its values in one")
        space[name] = _axis(name, text, config)
    for name in space:
        _check_used(name, space, config)
    return space


def _axis(name: str, text: str, config: Config) -> Choices | Span:
    section = name.partition(".")[0]
    if section not in SEARCHED_SECTIONS:
        raise UserError(
            f"--search takes settings of {', '.join(SEARCHED_SECTIONS)}, such as "
            f"{NUM_HARD_EXAMPLES}, got {name!r}"
        )
    if name == TAIL_FRACTION:
        raise UserError(f"k' is searched as a number: {NUM_HARD_EXAMPLES}, not {name}")
    low, is_span, high = text.partition("..")
    if not is_span:
        values = [_value(name, item, config) for item in text.split(",")]
        return Choices(tuple(dict.fromkeys(values)))
    ends = [_value(name, item, config) for item in (low, high)]
    if any(isinstance(end, str) for end in ends) or not ends[0] < ends[1]:  # type: ignore[operator]
        raise UserError(f"--search {name} needs two numbers, the lower one first, got {text!r}")
    return Span(*ends)  # type: ignore[arg-type]


def _value(name: str, text: str, config: Config) -> Value:
    """A value as its setting has it; one that the setting cannot have is refused."""
    try:
        value = parse_toml(f"value = {text.strip()}")["value"]
    except ValueError:  # a bare word
        value = text.strip()
    if isinstance(value, str) and ("," in value or ".." in value):  # written as an escape
        raise UserError(f"--search {name} takes words without ',' and '..', got {text.strip()!r}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UserError(f"--search {name} takes numbers or words, got {text.strip()!r}")
    typed: Value = setting_of(with_settings(config, {name: value}), name)
    return typed


def _written(value: Value) -> str:
    """As `_value` reads it: a word without quotes where it is no number or truth value."""
    is_bare = isinstance(value, str) and PLAIN_WORD.fullmatch(value) and value not in TOML_WORDS
    return str(value) if is_bare else toml_value(value)


def _check_used(name: str, space: Space, config: Config) -> None:
    """Refuses to search a setting that the method never looks at."""
    mining = config.mining
    is_used = {
        NUM_HARD_EXAMPLES: mining.mines_examples,
        NUM_HARD_LABELS: mining.draws_labels,
        ANNEAL_FRACTION: mining.is_annealed,
    }
    if METHOD not in space and not is_used.get(name, True):
        raise UserError(
            f"{name} changes nothing with {METHOD} = {mining.method!r}; choose another method, "
            f"such as --method s2m-annealed, or do not search it"
        )


# --- settings of a trial --------------------------------------------------------------------------


def with_settings(config: Config, settings: Mapping[str, Value]) -> Config:
    """The config with some settings changed, checked as a whole."""
    sections = dataclasses.asdict(config)
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return build_config(sections)


def setting_of(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def with_number(config: Config) -> Config:
    """The config with its k' as a number, and not as a share of the batch."""
    if not config.mining.tail_fraction:
        return config
    k_prime: Settings = {NUM_HARD_EXAMPLES: config.mining.num_counting, TAIL_FRACTION: 0.0}
    return with_settings(config, k_prime)


def shown_settings(trials: Sequence[Settings]) -> list[dict[str, str]]:
    """For each trial, k' and what else differs between them, under short names, for people."""
    names = [name for name in trials[0] if len({trial[name] for trial in trials}) > 1]
    names = [name for name in names if name not in (METHOD, NUM_HARD_EXAMPLES)]
    if len({trial[METHOD] for trial in trials} - {"snm", "sgd"}) > 1:
        names.insert(0, METHOD)
    return [
        {
            SHORT_NAMES[NUM_HARD_EXAMPLES]: _shown(NUM_HARD_EXAMPLES, trial),
            **{SHORT_NAMES.get(name, name): _shown(name, trial) for name in names},
        }
        for trial in trials
    ]


def _shown(name: str, trial: Settings) -> str:
    is_baseline = trial[METHOD] in ("snm", "sgd")
    if is_baseline and name == NUM_HARD_EXAMPLES:
        return "all"
    return "–" if is_baseline and name == ANNEAL_FRACTION else str(trial[name])


def baseline_method(config: Config) -> str:
    """What a method is without the mining of examples."""
    return "snm" if config.mining.draws_labels else "sgd"


def planned_trials(config: Config, space: Space, *, num_trials: int, seed: int) -> list[Planned]:
    """The baseline, the config as given, then points that fill the space evenly; none twice.

    The same seed gives the same trials, and more trials begin with those of fewer. There are
    fewer than `num_trials` where the space does not hold as many.
    """
    names = [METHOD, NUM_HARD_EXAMPLES, *(n for n in space if n not in (METHOD, NUM_HARD_EXAMPLES))]
    as_given: Settings = {name: setting_of(config, name) for name in names}
    as_given[NUM_HARD_EXAMPLES] = config.mining.num_counting
    everyone: Settings = {
        METHOD: baseline_method(config),
        NUM_HARD_EXAMPLES: config.mining.batch_size,
    }
    trials = [
        Planned(baseline_method(config).upper(), _plain(config, as_given | everyone)),
        Planned("as given", _plain(config, as_given)),
    ]
    trials = trials[: 1 if trials[0].settings == trials[1].settings else 2]
    drawn: list[Settings] = []
    for shares in _even_shares(len(space), seed=seed, num_points=MOST_DRAWS * num_trials):
        if len(trials) >= num_trials:
            break
        axes = zip(space.items(), shares.tolist(), strict=True)
        point: Settings = {name: axis.at(share) for (name, axis), share in axes}
        if point in drawn:
            continue
        drawn.append(point)
        settings = _plain(config, as_given | point)
        if all(settings != trial.settings for trial in trials):
            trials.append(Planned("", settings))
    return trials


def _plain(config: Config, settings: Settings) -> Settings:
    """Settings that mean the same become the same: k' = the batch is the baseline method."""
    mining = with_settings(config, settings).mining  # refused here, if it is impossible
    method = mining.method
    if mining.num_counting == mining.batch_size:
        method = METHODS[method].at_whole_batch or method
    plain: Settings = {METHOD: method, NUM_HARD_EXAMPLES: mining.num_counting}
    if ANNEAL_FRACTION in settings and not METHODS[method].is_annealed:
        plain[ANNEAL_FRACTION] = config.mining.anneal_fraction
    return settings | plain


def _even_shares(
    num_dimensions: int, *, seed: int, num_points: int
) -> Iterator[NDArray[np.float64]]:
    """Points of the unit cube that fill it more evenly than chance, however many are taken.

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
        yield (start + number * steps) % 1
