"""A model whose KV cache is spread over ranks. Every rank has the weights; the engine, drafters, planner and
sampling run on rank 0 alone, which tells the others what to compute with it. Nothing is decided twice.

A pass takes one of two forms:
- Few rows (decoding, verification): every rank computes all of them, stores the K and V that are its own,
  attends to what it holds, and all merge.
- Many rows (prompts): a row is computed where its K and V belong, ring attention brings queries and keys
  together, and states go to rank 0.

Partial results are merged in the order of ranks in both, so a row's bits depend on the number of ranks, not
on the form.

Shape suffixes: T packed rows, R rows whose logits are wanted, V vocabulary, W hidden width, H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretell.attention import Batch, Queries, Segment, pack
from foretell.cache import KVArena
from foretell.kernels import HeadSpec, Kernels
from foretell.models.base import ForwardOutput, TargetModel
from foretell.parallel.arena import ShardedArena, Store
from foretell.parallel.channel import Channel
from foretell.parallel.choose import GLOO, NCCL, Work, choose
from foretell.parallel.group import Group
from foretell.parallel.layout import Placement
from foretell.parallel.ring import VARIANTS, Attention, Sharing, replicated
from foretell.parallel.visible import Range
from foretell.types import NO_NEEDS, Needs

_SPLIT = 16  # rows per rank from which on they are computed apart


@dataclass
class _Layers:
    """The attention of one pass; see `foretell.attention.Elsewhere`."""

    batch: Batch
    own: KVArena
    group: Group
    rows: list[Tensor]
    split: bool
    _sharing: dict[int | None, Sharing] = field(default_factory=dict)

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: HeadSpec, kernels: Kernels
    ) -> Tensor:
        keys_KSD, values_KSD = self.own.layer(layer)
        slot_T = self.batch.seen(spec.window).slot_T
        rows_T, size = self.rows[self.group.rank], self.group.size
        mine_T = rows_T[slot_T[rows_T] % size == self.group.rank]
        at = mine_T if not self.split else torch.arange(len(rows_T))
        place_T = (slot_T[mine_T] // size).to(keys_KSD.device)
        keys_KSD[:, place_T] = k_TKD[at].transpose(0, 1)
        values_KSD[:, place_T] = v_TKD[at].transpose(0, 1)
        sharing = self._sharing_of(spec.window)
        attention = Attention(sharing, self.group, kernels, spec)
        if self.split:
            index_S = self._slots(sharing, self.group.rank).to(keys_KSD.device)
            block_2KND = torch.stack([keys_KSD[:, index_S], values_KSD[:, index_S]])
            out_THD, _ = VARIANTS[self._choose(spec)](attention, q_THD, block_2KND)
        else:
            out_THD, _ = replicated(attention, q_THD, (keys_KSD, values_KSD))
        return out_THD.to(q_THD.dtype).flatten(1)

    def _sharing_of(self, window: int | None) -> Sharing:
        if window not in self._sharing:
            seen, size = self.batch.seen(window), self.group.size
            ranges: list[list[Range]] = []
            tokens = []
            placement = Placement(size)
            if not self.split:  # keys are read where they lie
                own = [Range(placement, 0, segment.start // size) for _, segment in self.batch.segments]
                self._sharing[window] = Sharing(seen, self.rows, [own] * size, [])
                return self._sharing[window]
            for rank in range(size):
                origin, own = 0, []
                for row, segment in self.batch.segments:
                    part_T = seen.lo_T[row : row + segment.rows]
                    first = int(part_T.min()) if segment.selected is None else 0
                    own.append(Range(placement, first, origin))
                    end = segment.past + segment.stored + segment.rows
                    origin += placement.count(rank, end) - placement.count(rank, first)
                ranges.append(own)
                tokens.append(origin)
            self._sharing[window] = Sharing(seen, self.rows, ranges, tokens)
        return self._sharing[window]

    def _slots(self, sharing: Sharing, rank: int) -> Tensor:
        """Places of this rank's store that its block is made of."""
        parts = []
        for (_, segment), held in zip(self.batch.segments, sharing.ranges[rank], strict=True):
            end, at = segment.past + segment.stored + segment.rows, segment.start // self.group.size
            first, last = (held.placement.count(rank, place) for place in (held.first, end))
            parts.append(torch.arange(at + first, at + last))
        return torch.cat(parts)

    def _choose(self, spec: HeadSpec) -> str:
        new = sum(segment.rows for _, segment in self.batch.segments)
        cached = sum(segment.past for _, segment in self.batch.segments)
        size = self.own.keys_LKSD.dtype.itemsize
        work = Work(self.group.size, new, cached, spec.heads, spec.kv_heads, spec.dim, size)
        return choose(work, NCCL if self.own.device.type == "cuda" else GLOO)


class Rank:
    """What every rank does when rank 0 tells it to.

    Args:
        model: the whole model, on each rank.
        group: the ranks.
    """

    def __init__(self, model: TargetModel, group: Group) -> None:
        self.model = model
        self.group = group
        self.stores: dict[int, Store] = {}

    def new_store(self, arena: int, slots: int) -> None:
        """This rank's part of an arena."""
        self.stores[arena] = Store(self.model.new_arena(slots), self.group)

    def drop(self, arena: int) -> None:
        """Frees it."""
        self.stores.pop(arena, None)

    def call(self, arena: int, method: str, *args: Any) -> None:
        """A method of the `Store`."""
        getattr(self.stores[arena], method)(*args)

    @torch.inference_mode()
    def forward(self, arena: int, segments: Sequence[Segment], needs: Needs) -> ForwardOutput | None:
        """This rank's part of a pass; rank 0 gets the result."""
        own, group = self.stores[arena].own, self.group
        batch = pack(segments, own)
        slot_T = batch.seen(None).slot_T
        owned = [torch.nonzero(slot_T % group.size == rank)[:, 0] for rank in range(group.size)]
        total = len(slot_T)
        split = (
            group.size > 1
            and total >= _SPLIT * group.size
            and min(map(len, owned)) >= total / (2 * group.size)
        )
        rows = owned if split else [torch.arange(total)] * group.size
        batch.elsewhere = _Layers(batch, own, group, rows, split)
        if split:
            output = self._split_pass(batch, rows, needs)
        else:
            if group.rank:
                batch.logit_R, needs = batch.logit_R[:0], NO_NEEDS
            output = self.model.forward(batch, needs)
        return None if group.rank else output

    def _split_pass(self, batch: Batch, rows: list[Tensor], needs: Needs) -> ForwardOutput | None:
        mine_T = rows[self.group.rank]
        own = replace(
            batch,
            token_T=batch.token_T[mine_T.to(batch.token_T.device)],
            position_T=batch.position_T[mine_T.to(batch.position_T.device)],
            position_cpu_T=batch.position_cpu_T[mine_T],
            logit_R=batch.logit_R[:0],
        )
        found = self.model.forward(own, replace(needs, last_hidden=True))
        assert found.hidden_TW is not None
        wanted_T = torch.ones(len(batch.token_T), dtype=torch.bool)
        if not needs.last_hidden:
            wanted_T[:] = False
            wanted_T[batch.logit_R.cpu()] = True
        hidden_TW = self._collect(found.hidden_TW, rows, wanted_T)
        all_T = torch.ones_like(wanted_T)
        aux_TW = {layer: self._collect(x_TW, rows, all_T) for layer, x_TW in sorted(found.aux_TW.items())}
        queries = {
            layer: Queries(self._collect(q.q_THD, rows, all_T), q.spec)
            for layer, q in sorted(found.queries.items())
        }
        if self.group.rank:
            return None
        logits_RV = self.model.head(hidden_TW[batch.logit_R])
        return ForwardOutput(logits_RV, hidden_TW if needs.last_hidden else None, aux_TW, queries)

    def _collect(self, x: Tensor, rows: list[Tensor], wanted_T: Tensor) -> Tensor:
        """The wanted rows of all ranks on rank 0, in their places; the others are 0."""
        rank, size = self.group.rank, self.group.size
        keep = [own_T[wanted_T[own_T]] for own_T in rows]
        mine = x[wanted_T[rows[rank]].to(x.device)].contiguous()
        if rank:
            self.group.exchange("states", {0: mine}, {}).wait()
            return x
        room = {peer: x.new_empty(len(keep[peer]), *x.shape[1:]) for peer in range(1, size)}
        self.group.exchange("states", {}, room).wait()
        whole = x.new_zeros(len(wanted_T), *x.shape[1:])
        for peer, part in enumerate([mine, *room.values()]):
            whole[keep[peer].to(x.device)] = part
        return whole


class ShardedModel:
    """A `TargetModel` on rank 0; the other ranks run `follow`.

    Args:
        rank: this process's part.
        channel: to the others.
        team: keeps the ranks together.
    """

    def __init__(self, rank: Rank, channel: Channel, team: Any) -> None:
        model = rank.model
        self.impl = model.impl
        self.weights = model.weights
        self.row_exact = model.row_exact
        self.vocab_size = model.vocab_size
        self.num_layers = model.num_layers
        self.num_heads = model.num_heads
        self.max_context = model.max_context
        self.hidden_size = model.hidden_size
        self.dtype = model.dtype
        self.device = model.device
        self.rank = rank
        self.team = team
        self._channel = channel
        self._arenas = 0
        self._forgotten: list[int] = []

    @property
    def ranks(self) -> int:
        """How many share the cache."""
        return self.rank.group.size

    def new_arena(self, slots: int) -> KVArena:
        """An arena of at least so many slots over all ranks."""
        number, own = self._arenas, -(-slots // self.rank.group.size)
        self._arenas += 1
        self._run("new_store", number, own)

        def tell(method: str, *args: Any) -> None:
            self._channel.send(("call", number, method, *args))

        arena = ShardedArena(number, self.rank.stores[number], self.rank.group, tell)
        # the ranks hear of it before the next command: a finaliser may run in the middle of one
        weakref.finalize(arena, self._forgotten.append, number)
        return arena

    def forward(self, batch: Batch, needs: Needs = NO_NEEDS) -> ForwardOutput:
        """One pass; see `TargetModel.forward`. The batch's rows are packed anew on every rank."""
        arena = batch.arena
        assert isinstance(arena, ShardedArena)
        segments = [segment for _, segment in batch.segments]
        output: ForwardOutput | None = self._run("forward", arena.number, segments, needs)
        assert output is not None
        return output

    def embed(self, token_T: Tensor) -> Tensor:
        """See `TargetModel.embed`."""
        return self.rank.model.embed(token_T)

    def head(self, hidden_RW: Tensor) -> Tensor:
        """See `TargetModel.head`."""
        return self.rank.model.head(hidden_RW)

    def _run(self, method: str, *args: Any) -> Any:
        while self._forgotten:
            number = self._forgotten.pop()
            self._channel.send(("drop", number))
            self.rank.drop(number)
        self._channel.send((method, *args))
        return getattr(self.rank, method)(*args)


def follow(rank: Rank, channel: Channel) -> None:
    """Does what rank 0 says until it says `stop`.

    Raises:
        RankError: rank 0 is gone.
    """
    while (command := channel.receive())[0] != "stop":
        method, *args = command
        getattr(rank, method)(*args)
