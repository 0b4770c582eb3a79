"""The search space, and the trials that a seed gives."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evenhand.config import Config, build_config, parse_toml
from evenhand.errors import UserError
from evenhand.methods import METHODS

METHOD, NUM_STEPS = "mining.method", "training.num_steps"
NUM_HARD_EXAMPLES, NUM_HARD_LABELS = "mining.num_hard_examples", "mining.num_hard_labels"
ANNEAL_FRACTION, TAIL_FRACTION = "mining.anneal_fraction", "mining.tail_fraction"
LEARNING_RATE = "training.learning_rate"
SEARCHED_SECTIONS = ("model", "loss", "mining", "risk", "training")  # others change what is judged
NAN = float("nan")
MOST_DRAWS = 1000  # for a new trial, before the space counts as exhausted

Value = int | float | str
Settings = dict[str, Value]  # by "section.key"
Space = dict[str, tuple[Value, ...]]  # a few values for each name, each as likely as another


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
    def is_scored(self) -> bool:
        """Whether both figures exist; a trial that diverged has none."""
        return not math.isnan(self.average) and not math.isnan(self.criterion)


# --- what is searched -----------------------------------------------------------------------------


def default_space(config: Config) -> Space:
    """k', k, learning rate, steps and schedule around a config, as far as its method uses them."""

    def whole_numbers(numbers: Sequence[float], most: float = math.inf) -> tuple[Value, ...]:
        return tuple(sorted({max(1, round(min(number, most))) for number in numbers}))

    mining, training = config.mining, config.training
    space: Space = {}
    if mining.mines_examples:
        num_dropped = config.risk.num_dropped if METHODS[mining.method].drops_hardest else 0
        sizes = [mining.batch_size / part for part in (16, 8, 4, 2, 1)]
        space[NUM_HARD_EXAMPLES] = whole_numbers(sizes, most=mining.batch_size - num_dropped)
    if mining.draws_labels:
        around = [mining.num_hard_labels * factor for factor in (1 / 4, 1, 4)]
        space[NUM_HARD_LABELS] = whole_numbers(around, most=mining.num_sampled_labels)
    rates = [training.learning_rate * factor for factor in (0.5, 0.7, 1, 1.4, 2)]
    space[LEARNING_RATE] = tuple(float(f"{rate:.3g}") for rate in rates)  # for people to read
    space[NUM_STEPS] = whole_numbers([training.num_steps / 2, training.num_steps])
    if mining.is_annealed:
        space[ANNEAL_FRACTION] = (0.0, 0.5, 1.0)
    return space


def parse_space(words: Sequence[str], config: Config) -> Space:
    """The space of words such as `loss.margin=0.2,0.3`."""
    space: Space = {}
    for word in words:
        name, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals or not text:
            raise UserError(f"--search takes section.key=1,2,3, got {word!r}")
        if name in space:
            raise UserError(f"--search {name} is given twice; list all its values in one")
        if name.partition(".")[0] not in SEARCHED_SECTIONS or name == TAIL_FRACTION:
            raise UserError(
                f"--search takes settings of {', '.join(SEARCHED_SECTIONS)}, and k' as "
                f"{NUM_HARD_EXAMPLES}, got {name!r}"
            )
        values: list[Value] = []
        for item in map(str.strip, text.split(",")):
            try:
                value = parse_toml(f"value = {item}")["value"]
            except ValueError:  # a bare word
                value = item
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise UserError(f"--search {name} takes numbers or words, got {item!r}")
            # As its setting has it; one that the setting cannot have is refused.
            values.append(get_setting(with_settings(config, {name: value}), name))
        space[name] = tuple(dict.fromkeys(values))
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
        chosen: Settings = {
            name: values[int(share * len(values))]
            for (name, values), share in zip(space.items(), point, strict=True)
        }
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
