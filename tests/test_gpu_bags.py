"""The Triton kernels of sparse bags, forwards and back to the table, against the torch code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.models import BagEncoder, Bags, RowGradients
from gpu_tables import (
    DEVICES,
    NO_TRITON,
    WIDTHS,
    assert_state_is,
    by_device,
    make_table,
    scalars,
    twin_of,
    unit_gradients,
)

bags = pytest.importorskip("evenhand.kernels.gpu.bags", reason=NO_TRITON)
entries = pytest.importorskip("evenhand.kernels.gpu.segment_update", reason=NO_TRITON)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def summed_by_row(row_ids, sources, values, vectors):
    """(T,) distinct ids and (T, D) sums of value * vector, in float64."""
    is_entry = row_ids >= 0
    ids, places = row_ids[is_entry].long().unique(return_inverse=True)
    terms = values[is_entry, None].double() * vectors.double()[sources[is_entry].long()]
    sums = torch.zeros(len(ids), vectors.shape[1], dtype=torch.float64)
    return RowGradients(ids, sums.index_add_(0, places, terms))


# Entries.


def random_entries(counts, *, num_empty, num_sources):
    """Row r has counts[r] entries, in random order, with empty ones between."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = torch.cat([ids, torch.full((num_empty,), -1)])
    ids = ids[torch.randperm(len(ids))]
    sources = torch.randint(num_sources, (len(ids),), dtype=torch.int32)
    return ids, sources, torch.randn(len(ids))


def update(table, given, vectors, device, *, step_number=1, is_cosine=False):
    entries.update_by_entries(
        table,
        *(tensor.to(device) for tensor in given),
        vectors.to(device),
        is_cosine=is_cosine,
        **scalars(device, learning_rate=0.1, step_number=step_number),
    )


COUNTS = {
    "whole blocks": [4, 8], "one more than a block": [5, 1, 9],
    "hot and rare": [1, 0, 18, 2, 1], "none": [0, 0],
}  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("optimizer", "num_empty"), [("adam", 6), ("adagrad", 0)])
def test_entries_are_summed_by_row_and_stepped_once(
    device, optimizer, counts, num_empty, monkeypatch
):
    monkeypatch.setattr(entries, "PIECE", 4)
    monkeypatch.setattr(entries, "NUM_PROGRAMS", 7)
    table = make_table(max(len(counts), 5), 3, optimizer=optimizer, device=device)
    twin, vectors = twin_of(table, optimizer), torch.randn(6, 3)
    for step_number in (1, 2):
        given = random_entries(counts, num_empty=num_empty, num_sources=6)
        twin.step(summed_by_row(*given, vectors), learning_rate=0.1)
        update(table, given, vectors, device, step_number=step_number)
        assert_state_is(table, twin)


@pytest.mark.parametrize("width", WIDTHS)
def test_entries_of_any_width_by_unit_rows(device, width):
    counts = by_device(device, [1, 0, 70, 2, 33, 1, 3], [1, 0, 2000, 2, 33, 1] * 300)
    table = make_table(len(counts), width, optimizer="adagrad", device=device)
    twin, vectors = twin_of(table, "adagrad"), torch.randn(9, width)
    ids, *others = random_entries(counts, num_empty=5, num_sources=9)
    gradients = summed_by_row(ids, *others, vectors)
    if width > 1:  # a unit row of one weight has no gradient, only rounding
        through = unit_gradients(gradients.values, twin.table[gradients.ids])
        gradients = RowGradients(gradients.ids, through)
    twin.step(gradients, learning_rate=0.1)
    update(table, (ids.int(), *others), vectors, device, is_cosine=width > 1)
    assert_state_is(table, twin)


# Bags.


def random_bags(num_documents, num_features, *, longest, values):
    """Every third bag is empty, and features repeat within a bag."""
    lengths = torch.randint(1, longest + 1, (num_documents,))
    lengths[::3] = 0
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(num_features, (int(offsets[-1]),), dtype=torch.int32)
    weights = None if values is None else torch.randn(len(ids)).to(values)
    return Bags(ids, offsets, weights)


def batch_of(data, documents):
    """What the encoder gets, to compute in float64."""
    values = None if data.values is None else data.values.double()
    return Bags(data.ids.long(), data.offsets, values).take(documents)


def on_device(data, device):
    values = None if data.values is None else data.values.to(device)
    return data.offsets.to(device), data.ids.to(device), values


VALUES = {"means": None, "float32": torch.float32, "float16": torch.float16}
every_value = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)


@every_value
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.float32), (3, torch.bfloat16), (130, torch.bfloat16), (300, torch.float32)],
)
def test_vectors_of_bags_are_those_of_the_encoder(device, width, values, dtype):
    longest, batch_size = by_device(device, (40, 4), (200, 2048))
    data = random_bags(20, 50, longest=longest, values=values)
    encoder = BagEncoder(50, width)
    encoder.weight.data = encoder.weight.data.to(dtype).float()
    documents = torch.cat([torch.tensor([0, 1]), torch.randint(20, (batch_size,))])
    out = torch.full((len(documents), width), 7.0, device=device)
    weight = encoder.weight.data.to(dtype).to(device)
    bags.bag_vectors(weight, *on_device(data, device), documents.to(device), out=out)
    expected = encoder.double()(batch_of(data, documents))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert not out[0].any()


def listed_entries(data, documents, survivors, num_survivors, device, *, capacity, id_type):
    """The entries, and what lies beyond them, which nobody may write."""
    beyond = capacity + 256
    ids = torch.full((beyond,), 77, dtype=id_type, device=device)
    sources = torch.full((beyond,), 77, dtype=torch.int32, device=device)
    values = torch.full((beyond,), 77.0, device=device)
    bags.bag_entries(
        *on_device(data, device),
        documents.to(device),
        survivors.to(device),
        torch.tensor([num_survivors], dtype=torch.int32, device=device),
        out_row_ids=ids[:capacity],
        out_sources=sources[:capacity],
        out_values=values[:capacity],
    )
    for tensor in (ids, sources, values):
        assert (tensor[capacity:] == 77).all()
    return [tensor[:capacity].cpu() for tensor in (ids, sources, values)]


@pytest.mark.parametrize("share", [0, 0.2, 0.6, 1])
@every_value
def test_entries_of_survivors_give_the_gradient_of_the_encoder(device, values, share, monkeypatch):
    batch_size, num_features = by_device(device, (5, 9), (1500, 2000))
    if device == "cpu":
        monkeypatch.setattr(bags, "SURVIVORS", 2)
        monkeypatch.setattr(bags, "LANES", 16)
    data = random_bags(4 * batch_size, num_features, longest=40, values=values)
    documents = torch.randperm(4 * batch_size)[:batch_size]
    survivors, num_survivors = torch.randperm(batch_size).int(), int(share * batch_size)
    survivors[num_survivors:] = 1  # left from another step
    found = listed_entries(
        data, documents, survivors, num_survivors, device,
        capacity=capacity_of(data, batch_size),
        id_type=torch.int64 if share == 1 else torch.int32,
    )  # fmt: skip
    features = batch_of(data, documents[survivors[:num_survivors].long()])
    num_entries = len(features.ids)
    assert torch.equal(found[0][:num_entries].long(), features.ids)  # one after another
    assert (found[0][num_entries:] == -1).all()
    gradients = torch.randn(num_survivors, 3, dtype=torch.float64)
    expected = BagEncoder(num_features, 3).row_gradients(features, gradients)
    ids, sums = summed_by_row(*found, gradients)
    order = expected.ids.argsort()  # rows come in any order
    assert torch.equal(ids, expected.ids[order])
    torch.testing.assert_close(sums, expected.values[order], rtol=1e-5, atol=1e-6)


@every_value
def test_entries_that_find_no_place_are_not_lost_in_silence(device, values):
    data = random_bags(6, 9, longest=20, values=values)
    documents, survivors = torch.arange(6), torch.arange(6, dtype=torch.int32)
    num_entries = len(data.ids)
    for capacity, is_seen in ((num_entries, False), (num_entries - 1, True), (1, True)):
        *_, found = listed_entries(
            data, documents, survivors, 6, device, capacity=capacity, id_type=torch.int32
        )
        assert found.isnan().all() == found.isnan().any() == is_seen


def capacity_of(data, batch_size, *, num_pairs=1):
    lengths = data.offsets.diff()
    return bags.entry_capacity(lengths, torch.full_like(lengths, num_pairs), batch_size)


@given(
    documents=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=6),
    batch_size=st.integers(1, 9),
)
def test_capacity_is_that_of_the_longest_batch_of_different_pairs(documents, batch_size):
    """By going through the pairs, the longest first: no batch of that size has more entries."""
    lengths, num_pairs = torch.tensor(documents).T
    pairs = sorted((length for length, count in documents for _ in range(count)), reverse=True)
    assert bags.entry_capacity(lengths, num_pairs, batch_size) == sum(pairs[:batch_size])
