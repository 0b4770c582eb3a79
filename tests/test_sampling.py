import functools
import itertools
import math

import pytest
import torch

from evenhand.sampling import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    MixedSampler,
    SampleRequest,
    UniformSampler,
    log_q_corrected,
)

NUM_LABELS = 12
COUNTS = [0, 5, 3, 1, 8, 0, 2, 4, 1, 6, 2, 0]  # zeros at both ends and in the middle
BATCH_SIZE, NUM_SAMPLED = 4, 6
POSITIVES = [4, 7, 4]  # of the example that is looked at; the last repeats the first
EVERY_LABEL = set(range(NUM_LABELS))
COUNTED_LABELS = {label for label, count in enumerate(COUNTS) if count > 0}


def samplers():
    counts = torch.tensor(COUNTS)
    uniform, frequency, in_batch = (
        UniformSampler(NUM_LABELS), FrequencySampler(counts), InBatchSampler(counts)
    )  # fmt: skip
    return {
        "uniform": uniform,
        "frequency": frequency,
        "in-batch": in_batch,
        "distinct frequency": Distinct(frequency),
        "in-batch and uniform": MixedSampler(in_batch, uniform, first_share=4 / 6),
        "frequency and uniform": MixedSampler(frequency, uniform, first_share=0.5),
    }


SAMPLERS = samplers()
DRAWABLE = dict.fromkeys(SAMPLERS, EVERY_LABEL)
for counted in ("frequency", "in-batch", "distinct frequency"):
    DRAWABLE[counted] = COUNTED_LABELS
every_sampler = pytest.mark.parametrize("name", SAMPLERS)
both_kinds = pytest.mark.parametrize("kind", ["shared", "for each"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(sampler, kind, positive_ids, num_sampled_labels, generator):
    method = sampler.sample if kind == "shared" else sampler.sample_for_each
    return method(positive_ids, num_sampled_labels, generator=generator)


def random_batch(generator, batch_size=BATCH_SIZE):
    """(B, 3) positives: the example looked at, then examples drawn from the training pairs."""
    weights = torch.tensor(COUNTS, dtype=torch.float64)
    others = torch.multinomial(weights, batch_size - 1, replacement=True, generator=generator)
    others = torch.stack([others, torch.full_like(others, -1), torch.full_like(others, -1)], dim=1)
    return torch.cat([torch.tensor([POSITIVES]), others])


@functools.cache
def first_rows(name, kind):
    """Ids and log-counts (trials, M) as the example with POSITIVES sees them."""
    generator, sampler = seeded(), SAMPLERS[name]
    if "in-batch" not in name:
        # The rows of one call are independent, and a shared sample is that of an example without
        # positives: test_a_shared_sample_is_that_of_an_example_without_positives.
        positives = [-1] if kind == "shared" else POSITIVES
        positive_ids = torch.tensor([positives]).repeat(5000, 1)
        return sampler.sample_for_each(positive_ids, NUM_SAMPLED, generator=generator)
    rows = []
    for _ in range(600):
        sample = draw(sampler, kind, random_batch(generator), NUM_SAMPLED, generator)
        rows.append([column.view(-1, NUM_SAMPLED)[0] for column in sample])
    ids, log_counts = zip(*rows, strict=True)
    return torch.stack(ids), torch.stack(log_counts)


def assert_within_five_deviations(draws, expected):
    """The mean over trials (trials, ...) against its expectation, trials being independent."""
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-6).all()


# Oracles: the definitions, in floats.


def expected_count(name, label, positives):
    """How often a label occurs in a sample of 6 for an example of a batch of 4."""
    allowed = [y for y in range(NUM_LABELS) if y not in positives]
    by_frequency = COUNTS[label] ** 0.75 / sum(COUNTS[y] ** 0.75 for y in allowed)

    def inclusion(num_draws):
        return 1 - (1 - by_frequency) ** num_draws

    in_batch = 1 - (1 - COUNTS[label] / sum(COUNTS)) ** (BATCH_SIZE - 1)
    num_left = NUM_LABELS - len(set(positives))
    return {
        "uniform": NUM_SAMPLED / num_left,
        "frequency": NUM_SAMPLED * by_frequency,
        "in-batch": in_batch,
        "in-batch and uniform": 1 - (1 - in_batch) * (1 - 2 / num_left),
        "frequency and uniform": 1 - (1 - inclusion(3)) * (1 - 3 / num_left),
        "distinct frequency": inclusion(NUM_SAMPLED),
    }[name]


@every_sampler
@both_kinds
def test_log_counts_match_their_definition(name, kind):
    positive_ids = random_batch(seeded())
    request = SampleRequest(positive_ids, NUM_SAMPLED, is_shared=kind == "shared")
    ids = torch.arange(NUM_LABELS).repeat(len(request.excluded_ids), 1)
    actual = SAMPLERS[name].log_counts(ids, request)[0].exp().tolist()
    positives = [] if kind == "shared" else POSITIVES
    for label in EVERY_LABEL - set(positives):
        expected = expected_count(name, label, positives)
        assert actual[label] == pytest.approx(expected, rel=1e-12, abs=1e-15)


@every_sampler
@both_kinds
def test_a_label_occurs_as_often_as_its_count_says(name, kind):
    ids, _ = first_rows(name, kind)
    positives = [] if kind == "shared" else POSITIVES
    for label in EVERY_LABEL - set(POSITIVES):
        occurrences = (ids == label).sum(1).double()  # (trials, M) -> (trials,)
        assert_within_five_deviations(occurrences, expected_count(name, label, positives))


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "in-batch" not in name])
@pytest.mark.parametrize("num_sampled_labels", [2, NUM_SAMPLED])
def test_a_shared_sample_is_that_of_an_example_without_positives(name, num_sampled_labels):
    sampler, nothing = SAMPLERS[name], torch.tensor([[-1]])
    shared = sampler.sample(random_batch(seeded()), num_sampled_labels, generator=seeded(1))
    each = sampler.sample_for_each(nothing, num_sampled_labels, generator=seeded(1))
    assert torch.equal(shared.ids, each.ids[0])
    assert torch.equal(shared.log_counts, each.log_counts[0])


@every_sampler
@both_kinds
def test_samples_keep_the_contract(name, kind):
    sampler, positive_ids = SAMPLERS[name], random_batch(seeded())
    given, global_state = positive_ids.clone(), torch.get_rng_state()
    for seed in range(10):
        ids, log_counts = draw(sampler, kind, positive_ids, NUM_SAMPLED, seeded(seed))
        assert ids.shape == ((NUM_SAMPLED,) if kind == "shared" else (BATCH_SIZE, NUM_SAMPLED))
        assert log_counts.shape == ids.shape
        assert (ids.dtype, log_counts.dtype) == (torch.int64, torch.float32)
        assert set(ids.flatten().tolist()) <= DRAWABLE[name] | {-1}
        assert log_counts.isfinite().all()
        assert (log_counts[ids < 0] == 0).all()
        if not sampler.has_repeats:
            assert (log_counts <= 0).all()
            for row in ids.view(-1, NUM_SAMPLED).tolist():
                labels = [label for label in row if label >= 0]
                assert len(labels) == len(set(labels))
        if kind == "for each":
            for row, positives in zip(ids.tolist(), positive_ids.tolist(), strict=True):
                assert not (set(row) - {-1}) & set(positives)
        again = draw(samplers()[name], kind, positive_ids, NUM_SAMPLED, seeded(seed))
        assert torch.equal(ids, again.ids)
        assert torch.equal(log_counts, again.log_counts)
    assert torch.equal(positive_ids, given)
    assert torch.equal(torch.get_rng_state(), global_state)


# Uniform subsets.


def assert_every_subset_is_as_likely(rows, labels):
    """Chi-square over all subsets of the labels, and over the label in the first slot."""
    num_drawn = rows.shape[1]
    for observed, cells in (
        ([tuple(sorted(row)) for row in rows.tolist()], itertools.combinations(labels, num_drawn)),
        ([(row[0],) for row in rows.tolist()], [(label,) for label in labels]),
    ):
        tally = dict.fromkeys(cells, 0)
        for cell in observed:
            tally[cell] += 1  # a KeyError is a sample that must not be
        expected, freedom = len(rows) / len(tally), len(tally) - 1
        statistic = sum((count - expected) ** 2 / expected for count in tally.values())
        assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("num_labels", "num_drawn"), [(7, 3), (6, 3), (5, 4)])
def test_a_shared_uniform_sample_is_any_subset_alike(num_labels, num_drawn):
    """By rejection, by permutation, and nearly all."""
    sampler, generator, positive_ids = UniformSampler(num_labels), seeded(), torch.tensor([[0]])
    rows = [sampler.sample(positive_ids, num_drawn, generator=generator).ids for _ in range(700)]
    assert_every_subset_is_as_likely(torch.stack(rows), range(num_labels))


@pytest.mark.parametrize("num_drawn", [2, 4], ids=["by rejection", "by permutation"])
@pytest.mark.parametrize("positives", [[2, 5, -1], [1, 3, 2], [7, 7, 7]], ids=str)
def test_a_uniform_sample_for_each_is_any_subset_of_its_negatives_alike(positives, num_drawn):
    # Another example between the rows, whose positives must not matter.
    positive_ids = torch.tensor([positives, [4, 5, 6]]).repeat(2000, 1)
    sample = UniformSampler(8).sample_for_each(positive_ids, num_drawn, generator=seeded())
    negatives = [label for label in range(8) if label not in positives]
    assert_every_subset_is_as_likely(sample.ids[::2], negatives)
    assert_every_subset_is_as_likely(sample.ids[1::2], [0, 1, 2, 3, 7])


def test_slots_are_empty_where_too_few_labels_remain():
    sampler, positive_ids = UniformSampler(5), torch.tensor([[3], [0]])
    shared = sampler.sample(positive_ids, 5, generator=seeded())
    assert sorted(shared.ids.tolist()) == [0, 1, 2, 3, 4]
    assert shared.log_counts.tolist() == [0] * 5
    each = sampler.sample_for_each(positive_ids, 4, generator=seeded())
    assert each.ids.sort().values.tolist() == [[0, 1, 2, 4], [1, 2, 3, 4]]
    assert each.log_counts.tolist() == [[0] * 4] * 2
    positive_ids = torch.tensor([[0, 1, 3, -1, -1], [2] + [-1] * 4, [0, 1, 2, 3, 3], range(5)])
    sample = sampler.sample_for_each(positive_ids, 3, generator=seeded())
    first, second, third, fourth = sample.ids.sort().values.tolist()
    assert (first, third, fourth) == ([-1, 2, 4], [-1, -1, 4], [-1] * 3)
    assert len(set(second) - {-1, 2}) == 3
    expected = torch.tensor([0, math.log(3 / 4), 0, 0])
    torch.testing.assert_close(sample.log_counts, expected.unsqueeze(1).expand(4, 3))
    for single in (UniformSampler(1), FrequencySampler(torch.tensor([2]))):
        sample = single.sample(torch.tensor([[-1]]), 1, generator=seeded())
        assert (sample.ids.tolist(), sample.log_counts.tolist()) == ([0], [0.0])


@both_kinds
def test_a_million_million_labels_cost_nothing(kind):
    num_labels = 2**40
    positive_ids = torch.tensor([[0, num_labels - 1], [5, -1]])
    sample = draw(UniformSampler(num_labels), kind, positive_ids, 3000, seeded())
    assert sample.ids.min() >= 0
    assert sample.ids.max() < num_labels
    assert len(sample.ids.unique()) == sample.ids.numel()
    assert_within_five_deviations((sample.ids < num_labels // 2).double().flatten(), 0.5)


def test_uniform_draws_do_not_prefer_small_ids():
    # torch.randint(num_labels) puts .344 of its draws into this third.
    num_labels = 3 * 2**26
    ids = UniformSampler(num_labels).sample(torch.tensor([[0]]), 60_000, generator=seeded()).ids
    assert_within_five_deviations((ids < num_labels // 3).double(), 1 / 3)


# Draws with repeats.


def test_a_label_that_is_nearly_always_drawn_can_be_excluded():
    sampler = FrequencySampler(torch.tensor([1.0, 1e12, 3.0]), power=1.0)
    positive_ids = torch.tensor([[1]]).repeat(2000, 1)
    sample = sampler.sample_for_each(positive_ids, 2, generator=seeded())
    assert set(sample.ids.flatten().tolist()) == {0, 2}
    assert_within_five_deviations((sample.ids == 2).double().flatten(), 3 / 4)
    expected = torch.where(sample.ids == 2, 2 * 3 / 4, 2 * 1 / 4)
    torch.testing.assert_close(sample.log_counts.exp(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["repeats", "distinct"])
def test_slots_are_empty_when_no_label_is_left_to_draw(wrapped):
    repeating = FrequencySampler(torch.tensor([0.1, 0.7, 0.0]))
    sampler = Distinct(repeating) if wrapped else repeating
    positive_ids = torch.tensor([[1, 0], [0, -1]])
    ids, log_counts = sampler.sample_for_each(positive_ids, 3, generator=seeded())
    assert ids[0].tolist() == [-1, -1, -1]
    assert log_counts[0].tolist() == [0, 0, 0]
    assert ids[1].tolist() == ([1, -1, -1] if wrapped else [1, 1, 1])
    expected = torch.tensor([0.0 if wrapped else math.log(3)] * 3)
    torch.testing.assert_close(log_counts[1], expected)


# In-batch and mixed.


def test_in_batch_negatives_are_the_other_examples_labels():
    positive_ids = torch.tensor([[4, 7], [1, -1], [4, 9], [7, 2]])
    sampler = InBatchSampler(torch.tensor(COUNTS))
    assert sampler.sample(positive_ids, 5, generator=seeded()).ids.tolist() == [4, 1, -1, 7, -1]
    each = sampler.sample_for_each(positive_ids, 4, generator=seeded()).ids.tolist()
    assert each == [[-1, 1, -1, -1], [4, -1, -1, 7], [-1, 1, -1, 7], [4, 1, -1, -1]]


def test_in_batch_counts_of_rare_labels_keep_their_digits():
    sampler = InBatchSampler(torch.tensor([10.0**15, 1.0]))
    sample = sampler.sample(torch.tensor([[0], [1], [0]]), 3, generator=seeded())
    assert sample.log_counts[1].item() == pytest.approx(math.log(2e-15), rel=1e-6)


class Consecutive:
    """Draws the labels from `first` on, and says nothing of how often."""

    has_repeats = False

    def __init__(self, first):
        self.first = first

    def draw(self, request, generator):
        return torch.arange(self.first, self.first + request.num_sampled_labels).unsqueeze(0)

    def log_counts(self, ids, request):
        return torch.zeros(ids.shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("share", "num_slots", "num_first"), [(2 / 3, 4, 3), (0.29, 100, 29), (0.51, 3, 2)]
)
def test_the_first_sampler_of_a_mixture_has_the_nearest_whole_number_of_slots(
    share, num_slots, num_first
):
    mixture = MixedSampler(Consecutive(0), Consecutive(1000), first_share=share)
    ids = mixture.sample(torch.tensor([[5000]]), num_slots, generator=seeded()).ids
    assert ids.tolist() == [*range(num_first), *range(1000, 1000 + num_slots - num_first)]


# The correction.


def test_the_correction_has_the_right_gradient_and_an_empty_slot_stays_empty():
    scores = torch.randn(3, 4, dtype=torch.float64, generator=seeded()).requires_grad_()
    log_counts = torch.randn(3, 4, generator=seeded(1))
    assert torch.autograd.gradcheck(lambda s: log_q_corrected(s, log_counts), scores)
    scores = torch.tensor([[0.5, -torch.inf, 1.0], [-torch.inf] * 3]).half().requires_grad_()
    log_counts = torch.tensor([-2.0, -torch.inf, 0.5])  # -inf: never drawn, so always empty
    corrected = log_q_corrected(scores, log_counts)
    assert corrected.dtype == torch.float16
    assert corrected.tolist() == [[2.5, -math.inf, 0.5], [-math.inf] * 3]
    corrected.backward(torch.ones_like(corrected))
    assert scores.grad.tolist() == [[1, 0, 1], [0, 0, 0]]


# Refusals.


def drawn_by(sampler_fn, positive_ids, num_sampled):
    return lambda kind: draw(sampler_fn(), kind, torch.tensor(positive_ids), num_sampled, seeded())


def in_batch():
    return InBatchSampler(torch.tensor([1, 1, 0]))


def mixed(share):
    return lambda: MixedSampler(UniformSampler(9), UniformSampler(9), first_share=share)


REFUSALS = [  # the first word of the sentence, what is refused
    *(
        ("label_counts", lambda kind, of=of, counts=counts: of(torch.tensor(counts)))
        for counts in ([0, 0], [1, -2], [1.0, math.nan], [1.0, math.inf], [[1, 1], [1, 1]])
        for of in (FrequencySampler, InBatchSampler)
    ),
    *(("num_labels", lambda kind, n=n: UniformSampler(n)) for n in (0, 2**40 + 1)),
    *(("num_sampled", drawn_by(lambda: UniformSampler(5), [[3]], count)) for count in (0, 6)),
    ("num_sampled", lambda kind: UniformSampler(5).sample_for_each(
        torch.tensor([[3]]), 5, generator=seeded())),
    ("repeats", lambda kind: Distinct(UniformSampler(3))),
    ("examples", drawn_by(in_batch, [[0], [1], [1]], 2)),  # more than slots
    ("examples", drawn_by(in_batch, [[0]], 2)),
    ("label", drawn_by(in_batch, [[0], [2]], 2)),
    *(("first_share", drawn_by(mixed(share), [[0]], 4)) for share in (0, 1, 0.1)),
]  # fmt: skip


@both_kinds
def test_what_cannot_be_drawn_is_refused(kind):
    for word, refused_fn in REFUSALS:
        with pytest.raises(ValueError, match=word):
            refused_fn(kind)
