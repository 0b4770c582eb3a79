"""The methods: which labels a step looks at, which examples count, and how k' changes over a run.

This is the one table of them: settings, training, tuning and the command's help read it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What sets a method apart.

    Attributes:
        summary: one line for people.
        risk: how the examples of a batch are weighed; a name that `build_risk` knows.
        samples_labels: False: every label is scored in every step.
        mines_examples: whether it has a k', the number of examples of a batch that count.
        is_annealed: whether k' shrinks from the whole batch.
        needs_groups: whether it reads the known groups of the examples.
        at_whole_batch: the method that it is the same as where k' is the whole batch.
    """

    summary: str
    risk: str = "hardest"
    samples_labels: bool = True
    mines_examples: bool = True
    is_annealed: bool = False
    needs_groups: bool = False
    at_whole_batch: str = ""


METHODS = {
    "sgd": Method(
        summary="all labels, all examples",
        risk="mean",
        samples_labels=False,
        mines_examples=False,
    ),
    "snm": Method(
        summary="hardest sampled labels, all examples",
        risk="mean",
        mines_examples=False,
    ),
    "snm-nonzero": Method(
        summary="snm, averaged over the examples that have a loss",
        risk="nonzero",
        mines_examples=False,
    ),
    "topk-sgd": Method(
        summary="all labels, hardest examples",
        samples_labels=False,
        at_whole_batch="sgd",
    ),
    "s2m": Method(
        summary="hardest sampled labels, hardest examples (Algorithm 1)",
        at_whole_batch="snm",
    ),
    "s2m-annealed": Method(
        summary="s2m, with k' shrinking from the whole batch",
        is_annealed=True,
        at_whole_batch="snm",
    ),
    "ranked-range": Method(
        summary="s2m-annealed without the very hardest, against wrong labels",
        risk="ranked-range",
        is_annealed=True,
    ),
    "cvar": Method(
        summary="s2m-annealed, with hard judged across batches (dual CVaR)",
        risk="cvar",
        is_annealed=True,
        at_whole_batch="snm",
    ),
    "chi-square": Method(
        summary="s2m-annealed, with the worst weights of a chi-square ball",
        risk="chi-square",
        is_annealed=True,
    ),
    "kl": Method(
        summary="s2m-annealed, with the worst weights of a Kullback-Leibler ball",
        risk="kl",
        is_annealed=True,
    ),
    "max": Method(
        summary="hardest sampled labels, the one hardest example",
        risk="max",
        mines_examples=False,
    ),
    "stochastic-max": Method(
        summary="the hardest example of all the data, by a weight for each",
        risk="stochastic-max",
        mines_examples=False,
    ),
    "group-dro": Method(
        summary="snm, with the worst mixture of groups that are known",
        risk="groups",
        mines_examples=False,
        needs_groups=True,
    ),
}
