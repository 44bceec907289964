"""Attention of rows that are spread over ranks, over keys that are spread over them too: three ways to bring
the two together, with one result, bit for bit.

- `pass-kv`: blocks of keys and values go round; each rank attends to one block while the next arrives (Ring
  Attention, Liu et al. 2023).
- `pass-q`: queries go round; partial results go straight back to whom they belong (Yang et al. 2024).
- `all-gather`: every rank gets all blocks at once.

Where every rank has all rows (decoding, verification), `replicated` merges what each makes of its own keys.
Blocks that none of the rows sees are passed on, not computed.

Shape suffixes: T rows, H query heads, K key/value heads, N keys, D head size, E = D + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretell.kernels import HeadSpec, Kernels, Visibility
from foretell.parallel.group import Group
from foretell.parallel.merge import Partial, merge, nothing, packed, unpacked
from foretell.parallel.visible import Range, part_of


@dataclass
class Sharing:
    """Who computes which rows, and who holds which keys; the same for all layers of one window.

    Args:
        seen: what all rows of the batch see.
        rows: per rank, its rows, ascending.
        ranges: per rank, where each request's keys lie in its block.
        tokens: per rank, the keys of its block.
    """

    seen: Visibility
    rows: list[Tensor]
    ranges: list[list[Range]]
    tokens: list[int]
    _parts: dict[tuple[int, int], Visibility] = field(default_factory=dict)

    def part(self, rows_of: int, keys_of: int) -> Visibility:
        """What one rank's rows see of another's keys."""
        key = rows_of, keys_of
        if key not in self._parts:
            self._parts[key] = part_of(self.seen, self.rows[rows_of], keys_of, self.ranges[keys_of])
        return self._parts[key]

    def cells(self, rows_of: int, keys_of: int) -> int:
        """Scores that one head computes."""
        return self.part(rows_of, keys_of).keys_read


@dataclass(frozen=True, slots=True)
class Attention:
    """What is the same in every step of one layer."""

    sharing: Sharing
    group: Group
    kernels: Kernels
    spec: HeadSpec

    def partial(
        self, q_THD: Tensor, block: tuple[Tensor, Tensor] | Tensor, rows_of: int, keys_of: int
    ) -> Partial | None:
        """One rank's rows over another's block; None = they see nothing of it. Sinks, which belong to no
        key, are the first rank's."""
        part = self.sharing.part(rows_of, keys_of)
        sinks = self.spec.sinks_H is not None and keys_of == 0
        if not len(q_THD) or not (part.keys_read or sinks):
            return None
        spec = self.spec if sinks else replace(self.spec, sinks_H=None)
        return self.kernels.partial(q_THD, (block[0], block[1]), part, spec)

    def merged(self, parts: Sequence[Partial | None], q_THD: Tensor) -> Partial:
        """Of all ranks, in their order."""
        found = [part for part in parts if part is not None]
        if not found:
            return nothing(q_THD)
        return merge(found)


def pass_kv(attention: Attention, q_THD: Tensor, block_2KND: Tensor) -> Partial:
    """Blocks go round: N - 1 sends of about the same size, each under the work on the block before it."""
    group = attention.group
    parts: list[Partial | None] = [None] * group.size
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        arriving, pending = block_2KND, None
        if step < group.size - 1:
            arriving = _room(block_2KND, attention.sharing.tokens[(owner - 1) % group.size])
            pending = group.exchange("pass-kv", {after: block_2KND}, {before: arriving})
        parts[owner] = attention.partial(q_THD, block_2KND, group.rank, owner)
        if pending is not None:
            pending.wait()
        block_2KND = arriving
    return attention.merged(parts, q_THD)


def pass_q(attention: Attention, q_THD: Tensor, block_2KND: Tensor) -> Partial:
    """Queries go round; each partial result goes home as soon as it is there."""
    group, sharing = attention.group, attention.sharing
    parts: list[Partial | None] = [None] * group.size
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    visiting, returns = q_THD.contiguous(), []
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        arriving, pending = visiting, None
        if step < group.size - 1:
            arriving = q_THD.new_empty(len(sharing.rows[(owner - 1) % group.size]), *q_THD.shape[1:])
            pending = group.exchange("pass-q", {after: visiting}, {before: arriving})
        part = attention.partial(visiting, block_2KND, owner, group.rank)
        if step == 0:
            parts[owner] = part
        else:
            helper = (group.rank + step) % group.size
            home = nothing(visiting) if part is None else part
            room_THE = torch.empty(*q_THD.shape[:2], q_THD.shape[2] + 1, device=q_THD.device)
            sent = group.exchange("pass-q", {owner: packed(home)}, {helper: room_THE})
            returns.append((sent, helper, room_THE))
        if pending is not None:
            pending.wait()
        visiting = arriving
    for sent, helper, room_THE in returns:
        sent.wait()
        parts[helper] = unpacked(room_THE)
    return attention.merged(parts, q_THD)


def all_gather(attention: Attention, q_THD: Tensor, block_2KND: Tensor) -> Partial:
    """All blocks at once, under the work on the own one."""
    group = attention.group
    blocks = [
        block_2KND if peer == group.rank else _room(block_2KND, attention.sharing.tokens[peer])
        for peer in range(group.size)
    ]
    receives = {peer: blocks[peer] for peer in group.others}
    pending = group.exchange("all-gather", dict.fromkeys(group.others, block_2KND), receives)
    parts: list[Partial | None] = [None] * group.size
    parts[group.rank] = attention.partial(q_THD, block_2KND, group.rank, group.rank)
    pending.wait()
    for peer in group.others:
        parts[peer] = attention.partial(q_THD, blocks[peer], group.rank, peer)
    return attention.merged(parts, q_THD)


def replicated(attention: Attention, q_THD: Tensor, store: tuple[Tensor, Tensor] | Tensor) -> Partial:
    """Every rank has all rows: each attends to what it holds, and all get every result. The bytes grow with
    the rows, not with the context."""
    group = attention.group
    own = attention.partial(q_THD, store, group.rank, group.rank)
    message_THE = packed(nothing(q_THD) if own is None else own)
    parts = group.gather("merge", message_THE, [tuple(message_THE.shape)] * group.size)
    return attention.merged([unpacked(part) for part in parts], q_THD)


Variant = Callable[[Attention, Tensor, Tensor], Partial]
VARIANTS: dict[str, Variant] = {"pass-kv": pass_kv, "pass-q": pass_q, "all-gather": all_gather}


def _room(block_2KND: Tensor, tokens: int) -> Tensor:
    """For a block of so many keys."""
    two, heads, _, dim = block_2KND.shape
    return block_2KND.new_empty(two, heads, tokens, dim)
