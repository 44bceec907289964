"""A KV arena whose slots are spread over ranks: slot s lies on rank s mod N, at place s // N of its store.

Ranges begin at multiples of N, so that place p of every request is rank p mod N's: what grows stays even, and
a prefix is copied within each rank.

Shape suffixes: L layers, K key/value heads, S slots, D head size, M moved slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretell.cache import KVArena
from foretell.parallel.group import Group
from foretell.parallel.layout import Placement


class Store:
    """One rank's part of an arena; every rank runs the same methods at the same time.

    Args:
        own: its K and V.
        group: the ranks.
    """

    def __init__(self, own: KVArena, group: Group) -> None:
        self.own = own
        self._group = group

    def move(self, source: Sequence[int], target: int) -> None:
        """See `KVArena.move`. What changes its rank is sent."""
        size, rank = self._group.size, self._group.rank
        source_M = torch.tensor(source, dtype=torch.int64)
        target_M = torch.arange(target, target + len(source))
        from_M, to_M = source_M % size, target_M % size
        values = {peer: self._read(source_M[(from_M == rank) & (to_M == peer)]) for peer in range(size)}
        room = {
            peer: self._empty(int(((from_M == peer) & (to_M == rank)).sum()))
            for peer in range(size)
            if peer != rank
        }
        sends = {peer: x for peer, x in values.items() if peer != rank}
        self._group.exchange("move", sends, room).wait()
        for peer in range(size):
            places_M = target_M[(from_M == peer) & (to_M == rank)] // size
            self._write(places_M, values[rank] if peer == rank else room[peer])

    def keys(self, layer: int, start: int, length: int) -> Tensor:
        """K of a range of slots on rank 0, [K, length, D]; nothing elsewhere."""
        size, rank = self._group.size, self._group.rank
        placement, first = Placement(size), start // size
        counts = [placement.count(peer, length) for peer in range(size)]
        own_KSD = self.own.keys_LKSD[layer, :, first : first + counts[rank]].contiguous()
        if rank:
            self._group.exchange("keys", {0: own_KSD}, {}).wait()
            return own_KSD[:, :0]
        kv_heads, _, dim = own_KSD.shape
        parts = [own_KSD, *(own_KSD.new_empty(kv_heads, count, dim) for count in counts[1:])]
        self._group.exchange("keys", {}, dict(enumerate(parts[1:], 1))).wait()
        found_KSD = own_KSD.new_empty(kv_heads, length, dim)
        for peer, part_KSD in enumerate(parts):
            found_KSD[:, peer::size] = part_KSD
        return found_KSD

    def _read(self, slot_M: Tensor) -> Tensor:
        index_M = slot_M.to(self.own.device) // self._group.size
        return torch.stack([x[:, :, index_M] for x in (self.own.keys_LKSD, self.own.values_LKSD)])

    def _empty(self, count: int) -> Tensor:
        layers, kv_heads, _, dim = self.own.keys_LKSD.shape
        return self.own.keys_LKSD.new_empty(2, layers, kv_heads, count, dim)

    def _write(self, place_M: Tensor, values_2LKMD: Tensor) -> None:
        index_M = place_M.to(self.own.device)
        self.own.keys_LKSD[:, :, index_M] = values_2LKMD[0]
        self.own.values_LKSD[:, :, index_M] = values_2LKMD[1]


class ShardedArena(KVArena):
    """The whole arena as rank 0 sees it; `keys_LKSD` and `values_LKSD` are rank 0's own part.

    Args:
        number: by which the ranks know it.
        store: rank 0's part.
        group: the ranks.
        tell: makes the other ranks call a method of their `Store` of this arena.
    """

    def __init__(self, number: int, store: Store, group: Group, tell: Callable[..., None]) -> None:
        self.keys_LKSD, self.values_LKSD = store.own.keys_LKSD, store.own.values_LKSD
        self.number = number
        self.store = store
        self._size = group.size
        self._tell = tell

    @property
    def slots(self) -> int:
        """Of all ranks together."""
        return self._size * self.keys_LKSD.shape[2]

    @property
    def grain(self) -> int:
        """See `KVArena.grain`."""
        return self._size

    def move(self, source: Sequence[int], target: int) -> None:
        """See `KVArena.move`."""
        slots = list(source)
        if not slots or (slots[0] == target and slots[-1] - target == len(slots) - 1):
            return
        self._call("move", slots, target)

    def keys(self, layer: int, start: int, length: int) -> Tensor:
        """See `KVArena.keys`; gathered from all ranks."""
        found: Tensor = self._call("keys", layer, start, length)
        return found

    def _call(self, method: str, *args: Any) -> Any:
        self._tell(method, *args)
        return getattr(self.store, method)(*args)
