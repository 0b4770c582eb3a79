"""The paper's statements as functions: each one computed, most of them in more ways than one.

order_weights         order-weighted averages, and the weights of random draws for each rank
expected              Lemma 1: the expected S2M loss, and the average the paper says it equals
retrieval             the retrieval loss, and the losses that bound it
cvar                  the conditional value at risk, in three ways, and Lemma 3
consistency           Proposition 2: what the top-k' loss is consistent for
bias                  Lemma 4: how far the CVaR of a sample is from that of the law
bounds                Proposition 5: bounds of the CVaR by that of a sample
rademacher            the complexity of a class, which those bounds rest on
subpopulation_bounds  the certificate: what one's own data say of every subpopulation
mean_bounds           confidence bounds of means, which the certificate rests on
even                  even-handed mining: the gap it measures, and the mixture it minimises
"""

from evenhand.theory.bias import (
    cvar_bias_bound,
    empirical_cvar_bias,
    expected_empirical_cvar,
)
from evenhand.theory.bounds import (
    Bound,
    GroupBounds,
    MixtureBound,
    corrected_bound,
    empirical_corrected_bound,
    finite_class_bound,
    known_membership_bound,
    mixture_bound,
    paper_bound,
    paper_covering_bound,
)
from evenhand.theory.consistency import (
    TopMinimiser,
    capped_predictions,
    threshold_value,
    top_minimiser,
)
from evenhand.theory.cvar import (
    AgnosticTop,
    WorstDensity,
    agnostic_top,
    cvar_by_definition,
    cvar_by_top,
    cvar_by_worst_density,
    cvar_curve,
    cvar_of_nonnegative_thresholds,
)
from evenhand.theory.even import (
    ExpectedWeights,
    effective_count,
    even_bound,
    expected_even_weights,
    gap_variance,
    mixed_risk,
    num_counting,
    put_back_bias,
    shrinkage_matrix,
)
from evenhand.theory.expected import (
    Estimate,
    LossDistribution,
    expected_order_weighted_average,
    expected_s2m_loss,
    expected_shared_s2m_loss,
    expected_shared_snm_loss,
    expected_snm_loss,
    lemma_1_right_side,
    simulated_s2m_loss,
    simulated_shared_s2m_loss,
    snm_loss_distribution,
)
from evenhand.theory.order_weights import (
    batch_weights,
    inclusion_probabilities,
    label_weights,
    order_weighted_average,
    shared_label_weights,
)
from evenhand.theory.rademacher import (
    empirical_rademacher,
    linear_rademacher_bound,
    sampled_rademacher,
    threshold_rademacher,
)
from evenhand.theory.retrieval import (
    bowl_bound,
    least_contrastive_loss_of_a_miss,
    least_loss_of_a_miss,
    order_weighted_bound,
    order_weighted_losses,
    retrieval_loss,
)

__all__ = [
    "AgnosticTop", "Bound", "Estimate", "ExpectedWeights", "GroupBounds", "LossDistribution",
    "MixtureBound", "TopMinimiser", "WorstDensity", "agnostic_top", "batch_weights", "bowl_bound",
    "capped_predictions", "corrected_bound", "cvar_bias_bound", "cvar_by_definition", "cvar_by_top",
    "cvar_by_worst_density", "cvar_curve", "cvar_of_nonnegative_thresholds", "effective_count",
    "empirical_corrected_bound", "empirical_cvar_bias", "empirical_rademacher", "even_bound",
    "expected_empirical_cvar", "expected_even_weights", "expected_order_weighted_average",
    "expected_s2m_loss", "expected_shared_s2m_loss", "expected_shared_snm_loss",
    "expected_snm_loss", "finite_class_bound", "gap_variance", "inclusion_probabilities",
    "known_membership_bound", "label_weights", "least_contrastive_loss_of_a_miss",
    "least_loss_of_a_miss", "lemma_1_right_side", "linear_rademacher_bound", "mixed_risk",
    "mixture_bound", "num_counting", "order_weighted_average", "order_weighted_bound",
    "order_weighted_losses", "paper_bound", "paper_covering_bound", "put_back_bias",
    "retrieval_loss", "sampled_rademacher", "shared_label_weights", "shrinkage_matrix",
    "simulated_s2m_loss", "simulated_shared_s2m_loss", "snm_loss_distribution",
    "threshold_rademacher", "threshold_value", "top_minimiser",
]  # fmt: skip
