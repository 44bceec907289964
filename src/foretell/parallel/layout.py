"""Which rank holds which place of a sequence: contiguous, striped or zigzag; any length, and its growth.

Shape suffixes: P places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foretell.errors import InputError

LAYOUTS = ("contiguous", "striped", "zigzag")


@dataclass(frozen=True)
class Placement:
    """Shards the places 0, 1, 2, ... of one sequence over ranks; each holds its places in ascending order.

    The first `length` places are cut into chunks, one per rank (contiguous) or two per rank, the i-th from
    the front and the i-th from the back (zigzag, Llama 3's layout). No length needs padding: sizes of chunks
    differ by at most one, and so do the places that ranks hold, at any time. What grows behind them goes to
    the ranks in turn, the emptiest first. Striped (Brandon et al. 2023) is growth from the beginning: place i
    belongs to rank i mod N.

    Args:
        ranks: N.
        layout: one of `LAYOUTS`.
        length: places that are laid out at once; without effect where striped.

    Raises:
        InputError: no such layout, or no rank.
    """

    ranks: int
    layout: str = "striped"
    length: int = 0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"unknown layout {self.layout!r}", hint=f"one of: {', '.join(LAYOUTS)}")
        if self.ranks < 1:
            raise InputError(f"ranks must be at least 1, got {self.ranks}")

    def owner(self, place_P: Tensor) -> Tensor:
        """The rank of each place, int64 [P]."""
        bounds, owners, turn = self._chunks
        grown_P = torch.tensor(turn)[(place_P - self._laid).clamp(min=0) % self.ranks]
        if not owners:
            return grown_P
        chunk_P = torch.searchsorted(torch.tensor(bounds), place_P, right=True) - 1
        laid_P = torch.tensor(owners)[chunk_P.clamp(max=len(owners) - 1)]
        return torch.where(place_P < self._laid, laid_P, grown_P)

    def below(self, rank: int, place_P: Tensor) -> Tensor:
        """How many places before each place the rank holds: the index that it has there, if it is its own."""
        bounds, owners, turn = self._chunks
        first = turn.index(rank)
        count_P = ((place_P - self._laid - first + self.ranks - 1) // self.ranks).clamp(min=0)
        for chunk, owner in enumerate(owners):
            if owner == rank:
                count_P = count_P + (place_P - bounds[chunk]).clamp(0, bounds[chunk + 1] - bounds[chunk])
        return count_P

    def count(self, rank: int, end: int) -> int:
        """How many of the places before `end` the rank holds."""
        return int(self.below(rank, torch.tensor([end])))

    def held(self, rank: int, end: int) -> Tensor:
        """The rank's places before `end`, ascending."""
        place_P = torch.arange(end)
        return place_P[self.owner(place_P) == rank]

    @property
    def _laid(self) -> int:
        return 0 if self.layout == "striped" else self.length

    @cached_property
    def _chunks(self) -> tuple[list[int], list[int], list[int]]:
        """Bounds of the chunks, the owner of each, and in which order the ranks take what grows."""
        ranks = list(range(self.ranks))
        if not self._laid:
            return [0], [], ranks
        owners = ranks if self.layout == "contiguous" else ranks + ranks[::-1]
        size, rest = divmod(self.length, len(owners))
        bounds = [i * size + min(i, rest) for i in range(len(owners) + 1)]
        held = [0] * self.ranks
        for chunk, owner in enumerate(owners):
            held[owner] += bounds[chunk + 1] - bounds[chunk]
        return bounds, owners, sorted(ranks, key=lambda rank: held[rank])


def split(x: Tensor, placement: Placement, dim: int = 0) -> list[Tensor]:
    """Each rank's part of a sequence, and of whatever goes with it: token ids, positions, masks."""
    end = x.shape[dim]
    return [x.index_select(dim, placement.held(rank, end)) for rank in range(placement.ranks)]


def join(parts: list[Tensor], placement: Placement, dim: int = 0) -> Tensor:
    """The sequence that `split` cut."""
    end = sum(part.shape[dim] for part in parts)
    order_P = torch.cat([placement.held(rank, end) for rank in range(placement.ranks)])
    return torch.cat(parts, dim).index_select(dim, order_P.argsort())
