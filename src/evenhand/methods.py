"""The methods by name, and what each looks at."""

METHODS = {
    "sgd": "all labels, all examples",
    "snm": "hardest sampled labels, all examples",
    "snm-nonzero": "snm, averaged over the examples that have a loss",
    "topk-sgd": "all labels, hardest examples",
    "s2m": "hardest sampled labels, hardest examples (Algorithm 1)",
    "s2m-annealed": "s2m, with k' shrinking from the whole batch",
    "ranked-range": "s2m-annealed without the very hardest examples, against wrong labels",
    "cvar": "s2m-annealed, with hard judged across batches (dual CVaR)",
    "chi-square": "s2m-annealed, with the worst weights of a chi-square ball",
    "kl": "s2m-annealed, with the worst weights of a Kullback-Leibler ball",
    "max": "hardest sampled labels, the one hardest example",
    "stochastic-max": "the hardest example of all the data, by a weight for each",
    "group-dro": "snm, with the worst mixture of groups that are known",
}
WITH_ALL_LABELS = ("sgd", "topk-sgd")
ANNEALED = ("s2m-annealed", "ranked-range", "cvar", "chi-square", "kl")
WITH_HARD_EXAMPLES = ("topk-sgd", "s2m", *ANNEALED)  # those that have a k'
