"""An event-driven simulation of one layer's ring attention: when each rank computes and when it waits.

A rank begins step s when it has finished step s - 1, has received that step's block and has sent its own on;
it then attends to the block while the next one arrives. A transfer begins when both ends have begun the step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from foretell.errors import InputError
from foretell.parallel.choose import Link
from foretell.parallel.layout import LAYOUTS

MOST_RANKS = 512


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does in a step, from `start` to `end` in seconds: "compute" or "transfer" (it receives)."""

    rank: int
    step: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A finished simulation. `seconds` is when the last rank ends; `busy` how long each rank computed."""

    spans: list[Span]
    seconds: float
    busy: list[float]

    @property
    def efficiency(self) -> float:
        """Share of all ranks' time in which they computed."""
        return sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 1.0


def cells(layout: str, rank: int, owner: int, shard: int) -> float:
    """Scores of a causal block, `shard` rows by `shard` keys; striped and zigzag blocks are half full."""
    if layout != "contiguous":
        return shard * shard / 2
    return shard * shard / 2 if rank == owner else float(shard * shard) if owner < rank else 0.0


@dataclass
class _Ring:
    """The simulation's state; a rank's step begins when nothing is missing any more."""

    compute: list[list[float]]
    transfer: float
    missing: list[list[int]]
    begun: list[list[bool]]
    events: list[tuple[float, int, int, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def run(self) -> None:
        ranks = len(self.compute)
        for rank in range(ranks):
            self._begin(rank, 0, 0.0)
        while self.events:
            now, rank, step, kind = heapq.heappop(self.events)
            self._part(rank, step + 1, now)
            if kind == "transfer":  # the sender may go on as well
                self._part((rank - 1) % ranks, step + 1, now)

    def _part(self, rank: int, step: int, now: float) -> None:
        if step >= len(self.compute):
            return
        self.missing[rank][step] -= 1
        if not self.missing[rank][step]:
            self._begin(rank, step, now)

    def _begin(self, rank: int, step: int, now: float) -> None:
        ranks = len(self.compute)
        self.begun[rank][step] = True
        self._span(rank, step, "compute", now, self.compute[rank][step])
        if step == ranks - 1:
            return
        for sender, receiver in (((rank - 1) % ranks, rank), (rank, (rank + 1) % ranks)):
            if self.begun[sender][step] and self.begun[receiver][step]:
                self._span(receiver, step, "transfer", now, self.transfer)

    def _span(self, rank: int, step: int, kind: str, now: float, lasts: float) -> None:
        self.spans.append(Span(rank, step, kind, now, now + lasts))
        heapq.heappush(self.events, (now + lasts, rank, step, kind))


def simulate(
    ranks: int, shard: int, heads: int, kv_heads: int, dim: int, value_bytes: int, link: Link, layout: str
) -> Timeline:
    """One layer of a causal prompt, `shard` tokens per rank.

    Raises:
        InputError: too many ranks, or no such layout.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"gpus must be from 1 to {MOST_RANKS}, got {ranks}")
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}", hint=f"one of: {', '.join(LAYOUTS)}")
    per_cell = 4 * heads * dim / link.flops
    compute = [
        [per_cell * cells(layout, rank, (rank - step) % ranks, shard) for step in range(ranks)]
        for rank in range(ranks)
    ]
    transfer = link.latency + 2 * shard * kv_heads * dim * value_bytes / link.bandwidth
    # its own computing, its own transfer, and that of the rank after it
    missing = [[3] * ranks for _ in range(ranks)]
    ring = _Ring(compute, transfer, missing, [[False] * ranks for _ in range(ranks)])
    ring.run()
    end = max(span.end for span in ring.spans)
    return Timeline(ring.spans, end, [sum(own) for own in compute])
