"""Compiled scoring and selecting: against attention probabilities and against sorting; bits that do not
depend on how rows came."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.kernels import HeadSpec, native_kernels
from foretell.sparse import add_attention, attention_mass
from foretell.sparse.signals import PageBounds, page_bounds

KERNELS = native_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no C compiler")
EXTRAS = {
    "plain": {},
    "window": {"window": 300},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])},
}


def world(keys: int, rows: int, seed: int = 0):
    torch.manual_seed(seed)
    return torch.randn(rows, 6, 8) * 3, torch.randn(2, keys, 8)


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("heads", [range(6), [1, 4], [3]], ids=["all", "both kv heads", "one"])
@pytest.mark.parametrize("keys", [1, 9, 512, 1300])
def test_totals_are_sums_of_attention(extra, heads, keys):
    """Blocks that are full, short, and hidden altogether; every head reads its own key/value head."""
    spec, rows = HeadSpec(6, 2, 8, 0.3, **extra), min(keys, 5)
    q, k = world(keys, rows)
    last = range(keys - rows, keys)
    total = torch.ones(keys)
    add_attention(total, q, k, spec, heads, last)
    wanted = 1 + attention_mass(q.double(), k.double(), spec, heads, last).sum(0).mean(0)
    torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-5)


def test_a_total_does_not_depend_on_how_its_rows_came():
    """One by one, before later keys were there, or together: the same bits. Also with more threads."""
    spec = HeadSpec(6, 2, 8, 0.3)
    q, k = world(2100, 60)
    together, one_by_one = torch.zeros(2100), torch.zeros(2100)
    add_attention(together, q, k, spec, range(6), range(2040, 2100))
    for row in range(60):
        end = 2041 + row
        add_attention(one_by_one[:end], q[row : row + 1], k[:, :end], spec, range(6), [end - 1])
    assert torch.equal(together, one_by_one)
    before, again = torch.get_num_threads(), torch.zeros(2100)
    try:
        torch.set_num_threads(3)
        add_attention(again, q, k, spec, range(6), range(2040, 2100))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, again)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_best_are_those_of_sorting(data):
    """With ties (the first ones win), infinities, zeros of both signs, and scores that differ in their last
    bit."""
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, 3e-42, -3e-42, 7e30, float("-inf"), 0.5])
    scores = data.draw(st.lists(values | st.floats(-2, 2, width=32), min_size=1, max_size=80))
    kept = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    free = [i for i in range(len(scores)) if not kept[i]]
    count = data.draw(st.integers(0, len(free)))
    score, mask = torch.tensor(scores), torch.tensor(kept)
    KERNELS.mark_best(score, mask, count)
    # zeros are told apart: IEEE's order of all floats has -0 below 0
    best = sorted(free, key=lambda i: (-score[i], torch.signbit(score[i])))[:count]
    assert [i for i in free if mask[i]] == sorted(best)
    assert all(mask[i] for i, before in enumerate(kept) if before)


def test_the_best_of_a_long_history():
    torch.manual_seed(0)
    score = torch.randn(20_000).softmax(0)
    mask = torch.zeros(20_000, dtype=torch.bool)
    mask[torch.randperm(20_000)[:300]] = True
    before = mask.clone()
    KERNELS.mark_best(score, mask, 777)
    wanted = score.masked_fill(before, -1).topk(777).indices
    assert set((mask & ~before).nonzero()[:, 0].tolist()) == set(wanted.tolist())


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_bounds_that_grow_are_bounds(lengths, seed):
    torch.manual_seed(seed)
    keys, bounds = torch.randn(2, 200, 8), PageBounds()
    for length in sorted(lengths):
        low, high = bounds.of(keys[:, :length])
        wanted = page_bounds(keys[:, :length])
        assert torch.equal(low, wanted[0])
        assert torch.equal(high, wanted[1])
