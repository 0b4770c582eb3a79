"""Settings of how a trained model is asked: the sections [search] and [ranker]."""

import dataclasses

from evenhand.errors import UserError
from evenhand.settings import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What is added to the model's scores: votes of similar training queries, and a handicap.

    A model gives frequent labels high scores because they are frequent, which is right for the
    first label of a list and wrong for the rare ones (Menon et al., Long-tail learning via logit
    adjustment, 2021).
    """

    frequency_discount: float = 0.0  # times log(1 + a label's training pairs), off its score
    num_neighbours: int = 0  # 0: none are asked
    neighbour_weight: float = 5.0  # what the votes of all neighbours together add to a score
    neighbour_power: float = 4.0  # a neighbour counts by its similarity to this power

    def __post_init__(self) -> None:
        names = ("frequency_discount", "num_neighbours", "neighbour_weight", "neighbour_power")
        for name in names:
            if not getattr(self, name) >= 0:
                raise UserError(f"search.{name} must be at least 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig:
    """A linear classifier a label, fitted after training on the labels that are hardest then."""

    num_mined_labels: int = 0  # of each training query; 0: no ranker
    positive_cost: float = 0.5  # of a loss where the label is right; higher fits more closely
    negative_cost: float = 0.2  # where it is wrong
    smallest_weight: float = 0.01  # weights below it are dropped
    weight: float = 12.0  # what a score of 1 of the ranker adds to the model's
    num_candidates: int = 200  # the first labels of the model, and no others, are ranked

    def __post_init__(self) -> None:
        check_positive(
            "ranker",
            positive_cost=self.positive_cost,
            negative_cost=self.negative_cost,
            num_candidates=self.num_candidates,
        )
        for name in ("num_mined_labels", "smallest_weight", "weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"ranker.{name} must be at least 0, got {getattr(self, name)}")
