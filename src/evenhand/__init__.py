"""Evenhand: retrieval models that work for every part of the data.

For a training loop of your own there is `S2MLoss`; or draw negatives with a sampler, score them,
`mask_positives`, and hand the scores to `s2m_loss`.
"""

import os
import sys
import warnings

# Threads that wait spin for a moment and then sleep. By default they spin for long, and when
# another program takes a core, a step takes several times as long. OpenMP reads this when torch is
# loaded.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    if "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = "2000"
    elif sys.platform == "linux":
        warnings.warn(
            "torch was imported before evenhand, so its threads spin while they wait, and on a "
            "busy machine training is 4 to 6 times slower; import evenhand first, or set "
            "GOMP_SPINCOUNT=2000 in the environment (any value of it ends this warning)",
            RuntimeWarning,
            stacklevel=2,
        )

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenhand.version import __version__

if TYPE_CHECKING:
    from evenhand.api import Run, load, train
    from evenhand.encoding import two_pass
    from evenhand.errors import UserError
    from evenhand.loss_module import S2MLoss
    from evenhand.losses import (
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
    from evenhand.mining import hardest_examples, hardest_labels, mask_positives
    from evenhand.objective import s2m_loss
    from evenhand.predictions import evaluate_predictions
    from evenhand.risk import (
        DualCvar,
        EvenMining,
        GroupRisk,
        even_weights,
        mean_weights,
        ranked_range_weights,
        tail_weights,
        top_weights,
    )
    from evenhand.sampling import (
        Distinct,
        FrequencySampler,
        InBatchSampler,
        LabelSample,
        LabelSampler,
        MixedSampler,
        UniformSampler,
        log_q_corrected,
    )

__all__ = [
    "Distinct",
    "DualCvar",
    "EvenMining",
    "FrequencySampler",
    "GroupRisk",
    "InBatchSampler",
    "LabelSample",
    "LabelSampler",
    "MixedSampler",
    "Run",
    "S2MLoss",
    "UniformSampler",
    "UserError",
    "__version__",
    "averaged_loss",
    "bowl_loss",
    "contrastive_loss",
    "crammer_singer_loss",
    "evaluate_predictions",
    "even_weights",
    "exponential",
    "hardest_examples",
    "hardest_labels",
    "hinge",
    "load",
    "log_q_corrected",
    "logistic",
    "mask_positives",
    "mean_weights",
    "ranked_range_weights",
    "s2m_loss",
    "softmax_loss",
    "squared_hinge",
    "tail_weights",
    "top_weights",
    "train",
    "two_pass",
]

_HOMES = (
    "errors", "losses", "mining", "objective", "risk", "sampling", "encoding", "loss_module", "api",
    "predictions",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name, when it is first asked for: torch takes seconds to load, and a command that only
    says what it can do, or that a word was wrong, does without."""
    if name in _HOMES:
        return import_module(f"evenhand.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"evenhand.{home}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
