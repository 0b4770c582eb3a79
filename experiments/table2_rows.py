"""The rows of a table of the paper, each a TOML file in experiments/presets."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from evenhand.config import build, check_choice, check_positive, parse_toml, with_assignments
from evenhand.errors import UserError

TABLES = {
    "table2-mnist": "LeNet on MNIST, the tail classes cut 100 : 1",
    "table2-mnist-odd": "the same with odd digits as the tail",
    "table2-cifar10": "ResNet-50 on CIFAR-10, the tail classes cut 100 : 1",
    "table2-cifar10-resnet18": "ResNet-18 on the same, with even-handed mining",
}
STEMS = {"imagenet": (7, 2), "cifar": (3, 1), "small": (3, 2)}  # kernel size, stride
MODELS = ("lenet", "resnet18", "resnet50")
SCHEDULES = ("constant", "cosine")
NUM_CLASSES = 10  # of both
DATA = ("mnist", "cifar10")
PRECISIONS = ("float32", "bfloat16")  # of products on a GPU; float32 is TF32 there
OWN_OF_A_ROW = (
    "name", "num_hard_examples", "is_even", "learning_rate", "learning_rates", "has_control",
    "paper",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of table 2: what is trained, how, and how often."""

    name: str
    data: str
    model: str
    num_hard_examples: int  # k'; the batch size is SGD
    learning_rate: float  # constant; see the comment in the file for where it comes from
    learning_rates: tuple[float, ...]  # what --tune tries
    paper: dict[str, float]  # head, tail, full: what its table says, accuracy on the test part
    is_even: bool = False  # even-handed mining, k' shrinking from the whole batch over the run
    has_control: bool = False  # SGD at this row's learning rate x batch size / k' as well
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 0.0
    widths: tuple[int, ...] = ()  # of LeNet: two convolutions and the hidden layer; () is 20-50-500
    padding: int = 0  # of LeNet's convolutions; 2 keeps a picture's size
    stem: str = "cifar"  # of ResNet
    augments: bool = False  # pictures moved by up to 4 points and mirrored, in training
    schedule: str = "constant"  # of the learning rate; or "cosine", to 0 at the last step
    dropout: float = 0.0  # share of LeNet's hidden layer that a training step leaves out
    num_steps: int
    tuning_steps: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]  # none of the seeds
    tail_classes: tuple[int, ...] = (5, 6, 7, 8, 9)
    tail_share: float = 0.01  # of the tail classes' training pictures that are kept
    validation_share: float = 0.2  # of every class, held out while tuning
    precision: str = "float32"

    def __post_init__(self) -> None:
        check_choice("row.data", self.data, DATA)
        check_choice("row.model", self.model, MODELS)
        check_choice("row.precision", self.precision, PRECISIONS)
        check_choice("row.stem", self.stem, list(STEMS))
        check_choice("row.schedule", self.schedule, SCHEDULES)
        for name in ("batch_size", "learning_rate", "num_steps", "tuning_steps"):
            check_positive(f"row.{name}", getattr(self, name))
        tail, classes = set(self.tail_classes), set(range(NUM_CLASSES))
        is_lenet = self.model == "lenet"
        for name, is_right, wanted in (
            ("num_hard_examples", 1 <= self.num_hard_examples <= self.batch_size,
             f"between 1 and the batch size {self.batch_size}"),
            ("tail_share", 0 < self.tail_share < 1, "between 0 and 1"),
            ("validation_share", 0 < self.validation_share < 1, "between 0 and 1"),
            ("seeds", self.seeds and len(set(self.seeds)) == len(self.seeds),
             "one or more different numbers"),
            ("tuning_seeds", not set(self.seeds) & set(self.tuning_seeds),
             f"other seeds than row.seeds {self.seeds}"),
            ("widths", not self.widths or (len(self.widths) == 3 and min(self.widths) >= 1),
             "two numbers of channels and the hidden layer's width, such as [20, 50, 500]"),
            ("padding", self.padding in (0, 2), "0 or 2"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("model", is_lenet or not (self.widths or self.padding or self.dropout),
             '"lenet" where widths, padding or dropout are given'),
            ("tail_classes", tail and tail < classes,
             f"some of 0 to {NUM_CLASSES - 1}, but not all"),
        ):  # fmt: skip
            if not is_right:
                raise UserError(f"row.{name} must be {wanted}, got {getattr(self, name)}")

    @property
    def is_sgd(self) -> bool:
        return self.num_hard_examples == self.batch_size


def table_rows(table: str, assignments: Sequence[str] = ()) -> list[Row]:
    """The rows of a table, the smallest k' first and SGD last.

    Args:
        assignments: changes of every row, such as row.tail_classes=[1,3,5,7,9].
    """
    check_choice("the table", table, list(TABLES))
    paths = (Path(__file__).parent / "presets").glob(f"{table}-k*.toml")
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    rows = [read_row(text, name=name, assignments=assignments) for name, text in texts.items()]
    return check_together(sorted(rows, key=lambda row: (row.num_hard_examples, row.is_even)))


def read_row(text: str, *, name: str, assignments: Sequence[str] = ()) -> Row:
    try:
        sections = with_assignments(parse_toml(text), assignments)
        for section in sections:
            if section not in ("row", "paper"):
                raise UserError(f"there is no section [{section}] in {name}; known: row, paper")
        return build(Row, {**sections["row"], "paper": sections["paper"]}, section="row")
    except ValueError as error:  # TOMLDecodeError is one
        raise UserError(f"{name} is not TOML: {error}") from error
    except KeyError as error:
        raise UserError(f"{name} has no section [{error.args[0]}]") from error
    except TypeError as error:
        raise UserError(f"{name} lacks a setting: {error}") from error


def check_together(rows: list[Row]) -> list[Row]:
    """Rows are trained together and compared in pairs: only k', its rate and name may differ."""
    for field in dataclasses.fields(Row):
        values = [getattr(row, field.name) for row in rows]
        if field.name not in OWN_OF_A_ROW and len(set(values)) > 1:
            raise UserError(f"rows of one table must agree on {field.name}, got {set(values)}")
    if (count := sum(row.is_sgd for row in rows)) != 1:
        raise UserError(
            f"one row of the table must be SGD, with k' = the batch size, and {count} are"
        )
    return rows
