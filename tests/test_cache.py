"""The cache: random lives of requests, content checked after every operation."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foretell.cache import KVArena, KVCache

CPU = torch.device("cpu")


def make(slots: int = 40) -> KVCache:
    return KVCache(KVArena(2, 2, 8, slots, torch.float32, CPU))


def write(cache: KVCache, lease, rows: list[int]) -> None:
    """Stands in for a forward pass: block row r holds the value rows[r]."""
    first = lease.start + lease.length
    for row, value in enumerate(rows):
        cache.arena.keys_LKSD[:, :, first + row] = value
        cache.arena.values_LKSD[:, :, first + row] = -value


class Lives(RuleBasedStateMachine):
    """Requests are admitted, grow by accepted paths through junk, and finish."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make()
        self.live = []

    @rule(tokens=st.lists(st.integers(1, 3), min_size=1, max_size=10), extra=st.integers(1, 12))
    def admit(self, tokens, extra):
        lease = self.cache.reserve(tokens, len(tokens) + extra)
        if lease is None:
            starts = sorted((other.start, other.start + other.capacity) for other in self.live)
            edges = [(0, 0), *starts, (40, 40)]
            gaps = [after[0] - before[1] for before, after in pairwise(edges)]
            assert max(gaps) < len(tokens) + extra, "there was room between the live ranges"
            return
        assert lease.length < len(tokens), "the last token's logits are still to be computed"
        write(self.cache, lease, tokens[lease.length :])
        self.cache.commit(lease, range(len(tokens) - lease.length))
        self.live.append(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data):
        lease = data.draw(st.sampled_from(self.live))
        room = lease.capacity - lease.length
        if room < 1:
            return
        block = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=min(room, 5)))
        path = sorted(data.draw(st.sets(st.integers(0, len(block) - 1), min_size=1)))
        write(self.cache, lease, block)
        lease.tokens.extend(block[i] for i in path)
        self.cache.commit(lease, path)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cut=st.integers(0, 2))
    def finish(self, data, cut):
        lease = data.draw(st.sampled_from(self.live))
        self.live.remove(lease)
        del lease.tokens[max(1, len(lease.tokens) - cut) :]  # a stop string takes tokens back
        self.cache.release(lease)

    @invariant()
    def sound(self):
        self.cache.check_integrity()
        for lease in (*self.cache._live, *self.cache._kept):
            span = slice(lease.start, lease.start + lease.length)
            wanted = torch.tensor(lease.tokens[: lease.length], dtype=torch.float32)
            assert torch.equal(self.cache.arena.keys_LKSD[1, 1, span, 0], wanted)
            assert torch.equal(self.cache.arena.values_LKSD[0, 0, span, 7], -wanted)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_prefix_of_a_finished_request_is_reused():
    cache = make()
    first = cache.reserve([5, 6, 7, 8], 6)
    write(cache, first, [5, 6, 7, 8])
    cache.commit(first, range(4))
    cache.release(first)
    second = cache.reserve([5, 6, 7, 9, 9], 8)
    assert second.length == 3
    assert cache.reused == 3
    assert cache.arena.keys_LKSD[0, 0, second.start : second.start + 3, 0].tolist() == [5, 6, 7]


def test_the_whole_prompt_is_never_a_hit():
    cache = make()
    first = cache.reserve([5, 6], 4)
    write(cache, first, [5, 6])
    cache.commit(first, range(2))
    assert cache.reserve([5, 6], 4).length == 1


def test_kept_ranges_make_room_and_live_ones_do_not():
    cache = make(10)
    first = cache.reserve([1, 2, 3], 6)
    assert cache.reserve([4], 6) is None
    write(cache, first, [1, 2, 3])
    cache.commit(first, range(3))
    cache.release(first)
    assert cache.reserve([1, 2, 9, 9], 10).length == 2, "the prefix survives being overwritten in place"


def test_rollback_leaves_committed_slots_untouched():
    cache = make()
    lease = cache.reserve([1, 2], 20)
    write(cache, lease, [1, 2])
    cache.commit(lease, range(2))
    before = cache.arena.keys_LKSD[:, :, : lease.start + 2].clone()
    write(cache, lease, [7, 8, 9])
    cache.commit(lease, [])
    assert lease.length == 2
    assert torch.equal(cache.arena.keys_LKSD[:, :, : lease.start + 2], before)
