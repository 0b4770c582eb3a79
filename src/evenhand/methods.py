"""The methods: which labels a step looks at, which examples count, and how k' changes over a run.

This is the one table of them: settings, training, tuning and the command's help read it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Method:
    """What sets a method apart.

    Attributes:
        summary: one line for people.
        risk: how the examples of a batch are weighed; a name that `_build_risk` of build.py knows.
        samples_labels: False: every label is scored in every step.
        is_annealed: whether k' shrinks from the whole batch.
        at_whole_batch: the method that it is the same as where k' is the whole batch.
    """

    summary: str
    _: dataclasses.KW_ONLY
    risk: str = "hardest"
    samples_labels: bool = True
    is_annealed: bool = False
    at_whole_batch: str = ""

    @property
    def mines_examples(self) -> bool:
        """Whether it has a k', the number of examples of a batch that count."""
        return self.risk not in ("mean", "groups")

    @property
    def measures_gap(self) -> bool:
        """Whether training queries are held out to measure the generalisation gap."""
        return self.risk in ("even", "even-range")

    @property
    def drops_hardest(self) -> bool:
        """Whether the very hardest examples do not count."""
        return self.risk in ("ranked-range", "even-range")

    @property
    def needs_groups(self) -> bool:
        """Whether it reads the known groups of the examples."""
        return self.risk == "groups"


METHODS = {
    "sgd": Method("all labels, all examples", risk="mean", samples_labels=False),
    "snm": Method("hardest sampled labels, all examples", risk="mean"),
    "topk-sgd": Method("all labels, hardest examples", samples_labels=False, at_whole_batch="sgd"),
    "s2m": Method("hardest sampled labels, hardest examples (Algorithm 1)", at_whole_batch="snm"),
    "s2m-annealed": Method(
        "s2m, with k' shrinking from the whole batch", is_annealed=True, at_whole_batch="snm"
    ),
    "s2m-even": Method(
        "s2m-annealed by expected test loss, mixed with the mean",
        risk="even",
        is_annealed=True,
    ),
    "even-range": Method(
        "s2m-even without the very hardest, against wrong labels",
        risk="even-range",
        is_annealed=True,
    ),
    "ranked-range": Method(
        "s2m-annealed without the very hardest, against wrong labels",
        risk="ranked-range",
        is_annealed=True,
    ),
    "cvar": Method(
        "s2m-annealed, with hard judged across batches (dual CVaR)",
        risk="cvar",
        is_annealed=True,
        at_whole_batch="snm",
    ),
    "group-dro": Method("snm, with the worst mixture of groups that are known", risk="groups"),
}

# What to use instead of methods that old settings may name; docs/methods.md has their results.
DROPPED = {
    "snm-nonzero": '"snm"',
    "chi-square": '"s2m-annealed"',
    "kl": '"s2m-annealed"',
    "max": '"s2m" with mining.num_hard_examples = 1',
    "stochastic-max": '"s2m-annealed"',
}
