"""Packs the rows of many requests into one forward pass.

A request contributes a `Segment`: a chain of pending tokens (one in decoding, many in prefill), and
a draft tree hanging on the last of them. Every row's K and V go to the next free slots of the
request's range, in row order; a row sees the committed slots and its own ancestors. A tree that grows
over several passes names the nodes that are already stored and brings only the new ones as rows.

Shape suffixes: T packed rows, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretell.cache.arena import KVArena
from foretell.kernels import HeadSpec, Kernels, Visibility


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request in one step.

    Args:
        start: first slot of the request's range in the arena.
        past: committed tokens, stored at slots [start, start + past).
        pending: tokens that follow them, a chain; empty only where draft nodes are stored.
        draft: tokens of the draft tree.
        parents: index of each draft token's parent in `draft`; -1 = the last pending token. A parent
            comes before its children.
        logits: whether the last pending token's logits are wanted; a draft always gets them.
        stored: so many draft nodes have been written behind `past` by earlier passes.
        shift: added to the positions; the slots begin with position `shift`.
        selected: ascending places among the committed tokens, int64 on the CPU; the rows see no other of
            them. None = all. Positions stay what they are.
    """

    start: int
    past: int
    pending: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()
    logits: bool = True
    stored: int = 0
    shift: int = 0
    selected: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.pending) + len(self.draft) - self.stored

    @property
    def tokens(self) -> list[int]:
        """Tokens of the rows."""
        return [*self.pending, *self.draft[self.stored :]]

    def depths(self) -> list[int]:
        """How many draft tokens come before each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def paths(self) -> list[list[int]]:
        """For each draft token, its ancestors among the draft and its own place, in order, as slots
        behind `past`."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, len(self.pending) + node])
        return paths


@dataclass(frozen=True, slots=True)
class Queries:
    """Rotated queries of one layer's rows [T, H, D], and how that layer scores keys with them."""

    q_THD: Tensor
    spec: HeadSpec

    def at(self, rows: Sequence[int]) -> Queries:
        """Those of these rows."""
        return Queries(self.q_THD[list(rows)], self.spec)


class Elsewhere(Protocol):
    """Attention over keys that do not all lie in this process's arena; see `attend`."""

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: HeadSpec, kernels: Kernels
    ) -> Tensor: ...


@dataclass
class Batch:
    """One forward pass over packed rows; see `pack`.

    Attributes:
        token_T, position_T: int64 on the model's device and, for positions, on the CPU too.
        positions: how many positions reach to the last of them.
        logit_R: packed rows whose logits are wanted, in the order of the segments.
        segments: (first row, Segment) per request.
        attend_calls: attention layers that have run on this batch; the model checks it.
        capture: layers whose queries are wanted; `queries` holds them after the pass.
        elsewhere: does the attention instead of `kernels.attend` over `arena`.
    """

    token_T: Tensor
    position_T: Tensor
    position_cpu_T: Tensor
    positions: int
    logit_R: Tensor
    segments: list[tuple[int, Segment]]
    arena: KVArena
    attend_calls: int = 0
    capture: frozenset[int] = frozenset()
    queries: dict[int, Queries] = field(default_factory=dict)
    elsewhere: Elsewhere | None = None
    _seen: dict[int | None, Visibility] = field(default_factory=dict)

    def seen(self, window: int | None) -> Visibility:
        """What each row sees in a layer with this sliding window (None = everything before it)."""
        if window not in self._seen:
            self._seen[window] = _visibility(self.segments, window)
        return self._seen[window]


def pack(segments: Sequence[Segment], arena: KVArena) -> Batch:
    """The batch of these segments over `arena`."""
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    placed: list[tuple[int, Segment]] = []
    for segment in segments:
        row = len(tokens)
        placed.append((row, segment))
        tokens.extend(segment.tokens)
        first = segment.past + segment.shift
        tail = first + len(segment.pending)
        positions.extend(range(first, tail))
        positions.extend(tail + depth for depth in segment.depths()[segment.stored :])
        if segment.logits or segment.draft:
            logit_rows.extend(range(row + max(0, len(segment.pending) - 1), row + segment.rows))
    position_T = torch.tensor(positions, dtype=torch.int64)
    device = arena.device
    return Batch(
        token_T=torch.tensor(tokens, dtype=torch.int64, device=device),
        position_T=position_T.to(device),
        position_cpu_T=position_T,
        positions=max(positions) + 1,
        logit_R=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        segments=placed,
        arena=arena,
    )


def _visibility(segments: list[tuple[int, Segment]], window: int | None) -> Visibility:
    """A pass of few rows is short: rows are gathered in plain lists, and only one tensor is made of them."""
    slots: list[int] = []
    bases: list[int] = []
    lows: list[int] = []
    highs: list[int] = []
    order_at: list[int] = []
    starts: list[int] = [0]
    extra: list[int] = []
    orders: list[Tensor] = []
    listed = 0
    for _, segment in segments:
        first = segment.start + segment.past + segment.stored
        slots.extend(range(first, first + segment.rows))
        bases.extend([segment.start] * segment.rows)
        low, high = _ranges(segment, window, starts, extra)
        if segment.selected is not None:
            block = torch.arange(segment.past, segment.past + segment.rows + segment.stored)
            orders.append(torch.cat([segment.selected, block]))
            # from slots to places in the list of those that are read
            low, high = (torch.searchsorted(orders[-1], torch.tensor(b)).tolist() for b in (low, high))
        order_at.extend([-1 if segment.selected is None else listed] * segment.rows)
        listed += 0 if segment.selected is None else len(orders[-1])
        lows.extend(low)
        highs.extend(high)
    lists = slots, bases, lows, highs, starts, extra, order_at
    whole = torch.tensor([value for values in lists for value in values], dtype=torch.int64)
    slot_T, base_T, lo_T, hi_T, extra_start, extra_E, order_T = whole.split([len(each) for each in lists])
    order = torch.cat(orders) if orders else whole[:0]
    placed = tuple((row, segment.rows) for row, segment in segments)
    return Visibility(slot_T, base_T, lo_T, hi_T, extra_start, extra_E, order_T, order, placed)


def _ranges(
    segment: Segment, window: int | None, starts: list[int], extra: list[int]
) -> tuple[list[int], list[int]]:
    """First slot behind the request's beginning that each row sees, and the end of that range. Appends what a
    row sees behind it to `extra`, and where that ends to `starts`."""
    chain, past = len(segment.pending), segment.past
    high = list(range(past + 1, past + chain + 1))
    low = [0] * chain if window is None else [max(0, end - window) for end in high]
    starts.extend([len(extra)] * chain)
    for path in segment.paths()[segment.stored :]:
        # slots of the path that directly follow the committed ones belong to the range
        run = next((i for i, at in enumerate(path) if at != chain + i), len(path))
        oldest = 0 if window is None else max(0, past + chain + len(path) - window)
        high.append(past + chain + run)
        low.append(min(oldest, past + chain + run))
        extra.extend(past + path[i] for i in range(run, len(path)) if past + chain + i >= oldest)
        starts.append(len(extra))
    return low, high
