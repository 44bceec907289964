"""What some rows of a batch see of the keys that one rank holds.

Shape suffixes: T rows, X further slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.kernels import Visibility
from foretell.parallel.layout import Placement


@dataclass(frozen=True, slots=True)
class Range:
    """A request's keys on one rank.

    Args:
        placement: of the request's places.
        first: the first of them that is stored here; earlier ones are seen by no row.
        origin: where that one lies in the rank's store.
    """

    placement: Placement
    first: int
    origin: int

    def at(self, rank: int, place_X: Tensor) -> Tensor:
        """Where places lie in the rank's store, or, if they are another's, where its next one does."""
        skipped = self.placement.count(rank, self.first)
        return self.placement.below(rank, place_X) - skipped + self.origin


def part_of(seen: Visibility, rows_T: Tensor, rank: int, ranges: Sequence[Range]) -> Visibility:
    """`seen` for these rows, over the store of a rank: exactly what they see and the rank holds.

    Args:
        seen: of the whole batch.
        rows_T: ascending.
        ranges: per request of the batch.
    """
    los, his, ats, segments = [], [], [], []
    extras, counts, orders = [], [torch.zeros(1, dtype=torch.int64)], []
    done = listed = 0
    for (row, count), held in zip(seen.segments, ranges, strict=True):
        own_T = rows_T[(rows_T >= row) & (rows_T < row + count)]
        if not len(own_T):
            continue
        lo_T, hi_T = seen.lo_T[own_T], seen.hi_T[own_T]
        at = int(seen.order_at[row])
        if at < 0:
            lo_T, hi_T = held.at(rank, lo_T), held.at(rank, hi_T)
        else:
            list_X = _list(seen, at)
            mine_X = held.placement.owner(list_X) == rank
            before_X = torch.nn.functional.pad(mine_X.cumsum(0), (1, 0))
            lo_T, hi_T = before_X[lo_T], before_X[hi_T]
            orders.append(held.at(rank, list_X[mine_X]))
        extra_X, count_T = _extras(seen, own_T, rank, held)
        los.append(lo_T)
        his.append(torch.maximum(lo_T, hi_T))
        ats.append(torch.full_like(lo_T, -1 if at < 0 else listed))
        listed += 0 if at < 0 else len(orders[-1])
        extras.append(extra_X)
        counts.append(count_T)
        segments.append((done, len(own_T)))
        done += len(own_T)
    none = [torch.empty(0, dtype=torch.int64)]
    zero_T = torch.zeros(done, dtype=torch.int64)
    return Visibility(
        slot_T=zero_T,
        base_T=zero_T,
        lo_T=torch.cat(los or none),
        hi_T=torch.cat(his or none),
        extra_start=torch.cat(counts).cumsum(0),
        extra=torch.cat(extras or none),
        order_at=torch.cat(ats or none),
        order=torch.cat(orders or none),
        segments=tuple(segments),
    )


def _extras(seen: Visibility, rows_T: Tensor, rank: int, held: Range) -> tuple[Tensor, Tensor]:
    """Of each row's further slots those that the rank holds, and how many they are."""
    start_T, end_T = seen.extra_start[rows_T], seen.extra_start[rows_T + 1]
    if not int((end_T - start_T).sum()):
        return seen.extra[:0], torch.zeros_like(rows_T)
    own = [seen.extra[a:b] for a, b in zip(start_T.tolist(), end_T.tolist(), strict=True)]
    own = [each[held.placement.owner(each) == rank] for each in own]
    return held.at(rank, torch.cat(own)), torch.tensor([len(each) for each in own])


def _list(seen: Visibility, at: int) -> Tensor:
    """The list of places that begins at `at`."""
    later = seen.order_at[seen.order_at > at]
    return seen.order[at : int(later.min()) if len(later) else len(seen.order)]
