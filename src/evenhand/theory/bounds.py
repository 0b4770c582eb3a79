"""Generalisation bounds for the average top-k' loss: proposition 5 as printed, and a correct one.

Each bounds CVaR_alpha of the loss under the law by its value on the sample plus a sum of terms, for
all scorers f of a class F at once, with probability at least 1 - delta. Losses lie in [0, B].

The derivation, with constants; Rad is E sup (1/N) sum_i sigma_i h(z_i), no absolute value.

1. For t_hat, the empirical minimiser, CVaR(f) <= t_hat + (1/alpha) E[l_f - t_hat]_+, because CVaR
   is a minimum over t. The right side is CVaR_hat(f) + (1/alpha) (E - E_hat)[l_f - t_hat]_+. So

       CVaR(f) - CVaR_hat(f) <= D := (1/alpha) sup over f, t in [0, B] of (E - E_hat)[l_f - t]_+,

   and no bias term is needed: the paper's last O(N^(-1/2)) is not there.
2. [l_f - t]_+ lies in [0, B]: one example moves D by at most B/(alpha N), and McDiarmid's
   inequality gives D <= E[D] + (B/alpha) sqrt(log(1/delta) / (2N)). The paper has 1 for B/alpha.
3. Symmetrisation: E[D] <= (2/alpha) Rad{[l_f - t]_+}. The paper loses the 2 on its way.
4. Contraction by the positive part, then a split that is exact, f and t being free of each other:
   Rad{[l_f - t]_+} <= Rad{l_f} + E sup_t (-t mean sigma) = Rad{l_f} + (B/2) E|mean sigma|, and
   E|mean sigma| <= 1/sqrt N. Twice that is the paper's B/sqrt N: this term it has right.
5. Rad{l_f} <= L Rad(F) for scalar scores and a loss of Lipschitz constant L. Where f is a vector
   and L is for its Euclidean norm, the factor is sqrt(2) L, and Rad(F) has a sign for each
   coordinate: E sup (1/N) sum_ij sigma_ij f_j(x_i) (Maurer, 2016). The paper has 1. Note that the
   softmax cross-entropy has L = sqrt 2, and is bounded only where scores are.

None of B/alpha, 2 and sqrt 2 can be left out: docs/theory.md has a class for each of them for which
the bound without it is false.

Known memberships (Mohri, Sivek and Suresh, 2019) are bounded group by group, or for a mixture.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from evenhand.theory.arguments import (
    DoubleArray,
    check_at_least,
    check_chance,
    check_tail_fraction,
)
from evenhand.theory.rademacher import threshold_rademacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What a bound is about."""

    num_examples: int  # N
    tail_fraction: float  # alpha
    loss_bound: float = 1.0  # B: losses lie in [0, B]
    failure_probability: float = 0.05  # delta

    def __post_init__(self) -> None:
        check_at_least("num_examples", self.num_examples, 1)
        check_tail_fraction(self.tail_fraction)
        check_chance("failure_probability", self.failure_probability)

    def deviation(self, share: float = 1.0) -> float:
        """sqrt(log(1 / (share delta)) / (2N))."""
        return math.sqrt(-math.log(share * self.failure_probability) / (2 * self.num_examples))


class Bound(NamedTuple):
    """What is added to the empirical CVaR, term by term."""

    complexity: float  # how rich the class of scorers is
    threshold: float  # the price of minimising over t
    deviation: float  # the price of confidence
    total: float


def paper_bound(rademacher: float, sample: Sample) -> Bound:
    """M_2 of proposition 5 as printed, without its O(N^(-1/2)): not a valid bound.

    (1/alpha) (Rad_N(F) + B/sqrt N) + sqrt(log(1/delta) / (2N)).

    Example:
        >>> sample = Sample(num_examples=100, tail_fraction=0.5)
        >>> round(paper_bound(0.1, sample).total, 3)
        0.522
    """
    complexity = rademacher / sample.tail_fraction
    threshold = sample.loss_bound / (sample.tail_fraction * math.sqrt(sample.num_examples))
    terms = complexity, threshold, sample.deviation()
    return Bound(*terms, sum(terms))


def paper_covering_bound(sample: Sample, *, diameter: float) -> float:
    """M_1 of proposition 5 as printed, up to its constant: a form, not a number to use.

    min(diam/(alpha delta), B sqrt(log(diam/(alpha delta)) / (alpha N))). The constant is not given,
    and none can serve every N: put into the inequality it is taken from,
    (diam/(epsilon alpha)) e^(-N alpha epsilon^2/B^2), the second form leaves delta/epsilon, not
    delta, and epsilon falls with N. A factor of sqrt(log N) is missing.

    Example:
        >>> round(paper_covering_bound(Sample(num_examples=100, tail_fraction=0.5), diameter=1), 3)
        0.272
    """
    least = sample.tail_fraction * sample.failure_probability
    if not diameter >= least:
        raise ValueError(
            f"diameter must be at least {least} (tail_fraction times failure_probability, where "
            f"the logarithm is 0), got {diameter}"
        )
    second = math.sqrt(math.log(diameter / least) / (sample.tail_fraction * sample.num_examples))
    return min(diameter / least, sample.loss_bound * second)


def corrected_bound(
    rademacher: float, sample: Sample, *, contraction: float = 1.0, is_empirical: bool = False
) -> Bound:
    """A valid form of proposition 5.

    (2/alpha) (contraction Rad_N + (B/2) E|mean sigma|) + (B/alpha) sqrt(log(1/delta) / (2N)), which
    is at most (2/alpha) contraction Rad_N + B/(alpha sqrt N) + the same deviation.

    Args:
        rademacher: Rad_N, of the losses themselves or of the scores.
        contraction: 1 for losses; L for scalar scores and an L-Lipschitz loss; sqrt(2) L for
            vectors of scores, with a sign for each coordinate.
        is_empirical: whether it is the complexity of the sample at hand, not the expected one.
            That is within (B/alpha) sqrt(log(2/delta) / (2N)) of its mean and counts twice, so
            the deviation is (3B/alpha) sqrt(log(2/delta) / (2N)).

    Example:
        >>> sample = Sample(num_examples=100, tail_fraction=0.5)
        >>> round(corrected_bound(0.1, sample).total, 3)
        0.804
    """
    deviation = 3 * sample.deviation(0.5) if is_empirical else sample.deviation()
    bound = sample.loss_bound
    threshold = threshold_rademacher(loss_bound=bound, num_examples=sample.num_examples)
    terms = 2 * contraction * rademacher, 2 * threshold, bound * deviation
    first, second, third = (term / sample.tail_fraction for term in terms)
    return Bound(first, second, third, total=first + second + third)


def finite_class_bound(sample: Sample, *, num_functions: int) -> float:
    """(B/alpha) sqrt(log(M/delta) / (2N)): for M fixed scorers no other term is needed.

    CVaR is (1/alpha) times the integral over [0, B] of min(alpha, P[loss > x]), so it moves by at
    most B/alpha times the largest distance of the two distribution functions, which the inequality
    of Dvoretzky, Kiefer and Wolfowitz bounds (one-sided, Massart, 1990: delta/M at most 1/2).

    Example:
        >>> sample = Sample(num_examples=100, tail_fraction=0.5)
        >>> round(finite_class_bound(sample, num_functions=1), 3)
        0.245
    """
    least = max(1, math.ceil(2 * sample.failure_probability))
    if num_functions < least:
        raise ValueError(
            f"num_functions must be at least {least} (so that failure_probability / num_functions "
            f"is at most 1/2), got {num_functions}"
        )
    return sample.loss_bound / sample.tail_fraction * sample.deviation(1 / num_functions)


def known_membership_bound(
    group_rademachers: ArrayLike,
    group_sizes: ArrayLike,
    *,
    loss_bound: float,
    failure_probability: float,
    contraction: float = 1.0,
) -> DoubleArray:
    """For every group at once, what its mean loss can exceed its empirical mean by: (G,).

    2 contraction Rad_{N_g} + B sqrt(log(G/delta) / (2 N_g)): the ordinary bound for each group with
    delta/G of the risk. The worst group, and so the worst of *all* mixtures (a mixture's excess is
    the average of its groups' excesses), is at most max_g of (empirical mean + this).

    Args:
        group_rademachers: (G,), expected complexity of the class on N_g examples of the group.
        group_sizes: (G,), N_g.

    Example:
        >>> bounds = known_membership_bound(
        ...     [0.0, 0.0], [100, 400], loss_bound=1.0, failure_probability=0.05
        ... )
        >>> bounds.round(3).tolist()
        [0.136, 0.068]
    """
    sizes = _checked_sizes(group_sizes)
    complexity = 2 * contraction * np.asarray(group_rademachers, dtype=np.float64)
    if complexity.shape != sizes.shape:
        raise ValueError(
            f"group_rademachers must have shape {sizes.shape} (one for each of group_sizes), "
            f"got {complexity.shape}"
        )
    check_chance("failure_probability", failure_probability)
    logarithm = math.log(len(sizes) / failure_probability)
    return np.asarray(complexity + loss_bound * np.sqrt(logarithm / (2 * sizes)))


def mixture_bound(
    mixture: ArrayLike,
    group_sizes: ArrayLike,
    *,
    rademacher: float,
    loss_bound: float,
    failure_probability: float,
    num_mixtures: int = 1,
    cover_radius: float = 0.0,
    contraction: float = 1.0,
) -> float:
    """What the mean loss of a mixture can exceed its empirical value by (Mohri and others, 2019).

    2 contraction Rad + B radius + B sqrt(sum_g lambda_g^2/N_g * log(M/delta) / 2), for M mixtures
    fixed beforehand, and for all others within `cover_radius` of one of them in the 1-norm. An
    example of group g weighs lambda_g/N_g, which is what McDiarmid's inequality squares and sums.
    N sum_g lambda_g^2/N_g is the skewness: 1 for the sample's own mixture, larger for all others.

    Args:
        mixture: (G,) lambda, summing to one.
        group_sizes: (G,), N_g.
        rademacher: weighted complexity, E sup sum_g (lambda_g/N_g) sum_i sigma_i h(z_i); at most
            the average of the groups' complexities under the mixture.

    Example:
        >>> settings = dict(rademacher=0.0, loss_bound=1.0, failure_probability=0.05)
        >>> round(mixture_bound([0.5, 0.5], [100, 400], **settings), 3)
        0.068
    """
    sizes, weights = _checked_sizes(group_sizes), np.asarray(mixture, dtype=np.float64)
    if weights.shape != sizes.shape or (weights < 0).any() or abs(weights.sum() - 1) > 1e-9:
        raise ValueError(
            f"mixture must be {len(sizes)} numbers of at least 0 that sum to 1 (one for each "
            f"group), got {weights}"
        )
    check_chance("failure_probability", failure_probability)
    variance = float((weights**2 / sizes).sum())
    deviation = loss_bound * math.sqrt(variance * math.log(num_mixtures / failure_probability) / 2)
    return 2 * contraction * rademacher + loss_bound * cover_radius + deviation


def _checked_sizes(group_sizes: ArrayLike) -> DoubleArray:
    sizes = np.asarray(group_sizes, dtype=np.float64)
    if sizes.ndim != 1 or sizes.size == 0 or not (sizes >= 1).all():
        raise ValueError(f"group_sizes must be numbers of at least 1, got {sizes}")
    return sizes
