"""Who owns which slots: admission by reservation, commit and rollback, reuse of prefixes.

A request owns one contiguous range, so reads are views; it may grow, in place or by moving. A finished
request's range stays as a source of prefixes until its slots are needed; the least recently used goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretell.cache.arena import KVArena


@dataclass(eq=False)
class Lease:
    """A request's slots [start, start + capacity).

    Slot start + i holds the K and V of `tokens[i]` for every i < `length`; `tokens` is the request's
    own list and may run ahead. From place `exact` on they come from passes that read a selection, and are of
    no use to another request; None = all are exact.
    """

    start: int
    capacity: int
    tokens: list[int]
    length: int = 0
    exact: int | None = None

    @property
    def shared(self) -> int:
        """Tokens that may become another request's prefix."""
        return self.length if self.exact is None else min(self.length, self.exact)


class KVCache:
    """Hands out leases of an arena. `reused` counts tokens that a prefix hit saved."""

    def __init__(self, arena: KVArena) -> None:
        self.arena = arena
        self.reused = 0
        self._live: list[Lease] = []
        self._kept: list[Lease] = []  # least recently used first

    def reserve(
        self, tokens: list[int], capacity: int, *, whole: bool = False, reuse: bool = True, again: int = 0
    ) -> Lease | None:
        """A lease for a request that will hold at most `capacity` tokens; None = wait.

        The longest prefix of `tokens` that any other lease holds is copied into it, unless `whole` but
        for the last token: its logits are still to be computed. Without `reuse` nothing is copied. The last
        `again` tokens of the prefix are left to be read again.
        """
        if self._gap(capacity, self._live) is None:
            return None
        longest = len(tokens) - (not whole) if reuse else 0
        source, hit = self._longest_prefix(tokens, longest)
        hit = max(0, hit - again)
        start = self._make_room(capacity, self._live)
        assert start is not None
        self._touch(source)
        lease = Lease(start, capacity, tokens)
        if source is not None and hit:
            self.arena.move(range(source.start, source.start + hit), start)
            self._drop_overlapping(lease)
            lease.length = hit
            self.reused += hit
        else:
            self._drop_overlapping(lease)
        self._live.append(lease)
        return lease

    def extend(self, lease: Lease, *, again: int = 0) -> None:
        """Copies into a lease that nothing was written to what others hold of its tokens by now, but for the
        last one, and for the last `again` of those that are found."""
        source, hit = self._longest_prefix(lease.tokens, len(lease.tokens) - 1)
        hit -= again
        if source is None or hit <= lease.length:
            return
        self._touch(source)
        new = range(source.start + lease.length, source.start + hit)
        self.arena.move(new, lease.start + lease.length)
        self.reused += hit - lease.length
        lease.length = hit

    def grow(self, lease: Lease, capacity: int) -> bool:
        """Gives a lease more slots, elsewhere if need be, at the cost of kept ranges; False = there are
        none."""
        others = [other for other in self._live if other is not lease]
        end = lease.start + capacity
        if end > self.arena.slots or any(lease.start <= other.start < end for other in others):
            start = self._make_room(capacity, others)
            if start is None:
                return False
            self.arena.move(range(lease.start, lease.start + lease.length), start)
            lease.start = start
        lease.capacity = capacity
        self._drop_overlapping(lease)
        return True

    @property
    def reserved(self) -> int:
        """Slots of running requests."""
        return sum(lease.capacity for lease in self._live)

    @property
    def used(self) -> int:
        """Slots of running requests that hold something."""
        return sum(lease.length for lease in self._live)

    @property
    def kept(self) -> int:
        """Slots that finished requests have left as prefixes."""
        return sum(lease.capacity for lease in self._kept)

    def commit(self, lease: Lease, rows: Sequence[int]) -> None:
        """Keeps these rows of the block that was written behind `lease.length`, in this order, and
        forgets the others."""
        first = lease.start + lease.length
        self.arena.move([first + row for row in rows], first)
        lease.length += len(rows)

    def release(self, lease: Lease) -> None:
        """Ends a lease; what it holds stays a source of prefixes."""
        self._live.remove(lease)
        lease.length, lease.exact = min(lease.shared, len(lease.tokens)), None
        if lease.length:
            lease.tokens = lease.tokens[: lease.length]
            lease.capacity = lease.length
            self._kept.append(lease)

    def forget(self) -> None:
        """Drops what finished requests left: the next one finds no prefix of theirs."""
        self._kept.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounting is broken."""
        taken = sorted(self._live + self._kept, key=lambda lease: lease.start)
        for lease in taken:
            assert 0 <= lease.length <= lease.capacity, f"{lease.length=} {lease.capacity=}"
            assert lease.length <= len(lease.tokens), f"{lease.length=} {len(lease.tokens)=}"
            assert lease.start >= 0
            assert lease.start + lease.capacity <= self.arena.slots, "range leaves the arena"
        for before, after in pairwise(taken):
            assert before.start + before.capacity <= after.start, "two ranges overlap"
        assert all(lease.length == len(lease.tokens) for lease in self._kept), "kept range out of step"

    def _longest_prefix(self, tokens: Sequence[int], longest: int) -> tuple[Lease | None, int]:
        best, best_length = None, 0
        for lease in (*self._live, *self._kept):
            limit = min(lease.shared, longest)
            if limit <= best_length or lease.tokens[: best_length + 1] != tokens[: best_length + 1]:
                continue
            length = best_length + 1
            while length < limit and lease.tokens[length] == tokens[length]:
                length += 1
            best, best_length = lease, length
        return best, best_length

    def _touch(self, source: Lease | None) -> None:
        """It was used just now."""
        if source is not None and source in self._kept:
            self._kept.remove(source)
            self._kept.append(source)

    def _make_room(self, capacity: int, taken: Sequence[Lease]) -> int | None:
        """The start of `capacity` slots that none of `taken` holds, at the cost of the kept ranges that
        were used longest ago; None = there are none."""
        kept = list(self._kept)
        while True:
            start = self._gap(capacity, [*taken, *kept])
            if start is not None or not kept:
                return start
            kept.pop(0)

    def _gap(self, capacity: int, taken: Sequence[Lease]) -> int | None:
        start, grain = 0, self.arena.grain
        for lease in sorted(taken, key=lambda lease: lease.start):
            if lease.start - start >= capacity:
                return start
            start = -(-(lease.start + lease.capacity) // grain) * grain
        return start if self.arena.slots - start >= capacity else None

    def _drop_overlapping(self, new: Lease) -> None:
        end = new.start + new.capacity
        self._kept = [k for k in self._kept if k.start >= end or k.start + k.capacity <= new.start]
