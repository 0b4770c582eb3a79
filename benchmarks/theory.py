"""How exact the weights of a billion are, how far Lemma 1 is from an equality, and equal weights
from the mixture that they stand for.

    python benchmarks/theory.py

The weights are compared with whole numbers at a hundred ranks and more, from the first to the last
with a probability above 1e-300, and so are those of `scipy.stats.hypergeom`.
"""

import functools
import math

import numpy as np
import scipy.stats

from evenhand.risk import GOLDEN
from evenhand.theory.even import expected_even_weights, num_counting
from evenhand.theory.expected import expected_s2m_loss, expected_snm_loss, lemma_1_right_side
from evenhand.theory.order_weights import inclusion_probabilities

BILLION = 10**9
SETTINGS = [(64, 1), (512, 1), (512, 128), (2048, 64), (4096, 16), (2048, 300), (4096, 40)]
number_of_draws = functools.lru_cache(math.comb)


def exact_probability(rank: int, num_drawn: int, num_kept: int) -> float:
    """P[H <= k' - 1] in whole numbers, divided once at the end."""
    larger, others, drawn = rank - 1, BILLION - 1, num_drawn - 1
    fewest, most = max(0, drawn - (others - larger)), min(drawn, larger)
    ways, total = math.comb(larger, fewest) * math.comb(others - larger, drawn - fewest), 0
    for count in range(fewest, min(most, num_kept - 1) + 1):
        total += ways
        ways = ways * (larger - count) * (drawn - count)
        ways //= (count + 1) * (others - larger - drawn + count + 1)
    return total / number_of_draws(others, drawn)


def last_rank(num_drawn: int, num_kept: int) -> int:
    """The last rank with a probability above 1e-300, by halving."""
    low, high = 1, BILLION + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_above = exact_probability(middle, num_drawn, num_kept) > 1e-300
        low, high = (middle, high) if is_above else (low, middle)
    return low


def show_weights() -> None:
    print("relative error of P[H <= k' - 1] at N = 10^9, worst of the ranks")
    for num_drawn, num_kept in SETTINGS:
        last = last_rank(num_drawn, num_kept)
        spread = np.concatenate([np.geomspace(1, last, 60), np.linspace(1, last, 60)])
        ranks = np.unique(spread.astype(np.int64))
        exact = np.array([exact_probability(int(rank), num_drawn, num_kept) for rank in ranks])
        ours = inclusion_probabilities(BILLION, num_drawn=num_drawn, num_kept=num_kept, ranks=ranks)
        theirs = scipy.stats.hypergeom.cdf(num_kept - 1, BILLION - 1, ranks - 1, num_drawn - 1)
        print(
            f"n {num_drawn:5d}, k' {num_kept:4d}, {len(ranks)} ranks down to {exact.min():.0e}: "
            f"{np.abs(ours / exact - 1).max():.1e}, scipy {np.abs(theirs / exact - 1).max():.1e}"
        )


def show_lemma() -> None:
    """200 made examples of mixed difficulty, 100 negatives each, hinge, batch 32."""
    generator = np.random.default_rng(0)
    difficulty = generator.normal(size=200)
    scores = 0.3 * generator.normal(size=(200, 101))
    positive_losses = np.maximum(0, 1 - (scores[:, 0] + 0.5 - 0.3 * difficulty))
    negative_losses = np.maximum(0, 1 + scores[:, 1:])
    print("Lemma 1: the expected loss, the right side, by how much the first is larger")
    for num_hard_examples, num_sampled in [(8, 20), (1, 20), (8, 5), (32, 20), (8, 100)]:
        labels = {"num_sampled_labels": num_sampled, "num_hard_labels": 1}
        examples = {"batch_size": 32, "num_hard_examples": num_hard_examples}
        left = expected_s2m_loss(positive_losses, negative_losses, **labels, **examples)
        losses = expected_snm_loss(positive_losses, negative_losses, **labels)
        right = lemma_1_right_side(losses, **examples)
        print(
            f"k' {num_hard_examples:2d}, M {num_sampled:3d}: {left:.4f} {right:.4f} "
            f"{100 * (left / right - 1):.1f} %"
        )


def show_even() -> None:
    """Of B places a share of q counts: by how many they differ from q B, at worst over q."""
    off = 0.0
    for size in range(1, 4097):
        places = np.sort(np.arange(1, size + 1) * GOLDEN % 2**32) / 2**32
        ranks = np.arange(size)
        off = max(off, (ranks + 1 - places * size).max(), (places * size - ranks).max())
    print(f"evenly spread places of every batch up to 4096: off by {off:.2f} at most")
    print("equal weights, relative to those of the mixture: of hard and of easy examples")
    for size in (32, 256, 1024, 2048, 4096):
        how = {"num_hard_examples": size // 4, "mined_share": 0.5}
        actual, count = expected_even_weights(size, **how), num_counting(size, **how)
        hard, easy = 100 * (actual.hard * count - 1), 100 * (actual.easy * 2 * size - 1)
        print(f"B {size:4d}, k' {size // 4:4d}: n {count:6.1f}, {hard:+.2f} %, {easy:+.2f} %")


if __name__ == "__main__":
    show_weights()
    show_lemma()
    show_even()
