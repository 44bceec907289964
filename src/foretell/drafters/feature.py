"""Runs a feature head (EAGLE-1/2/3, MTP) over a KV cache of its own.

Row i of the head takes token i + 1 and the feature of token i. Rows of emitted tokens always hold the
target's true features: what a draft wrote is written over once the target has answered. Rows are computed
when a draft needs them, for all requests together, so a request that never drafts pays for none; until then
the target's states wait, of a long text a few thousand. Where a prefix hit of the target has left states out
that the head's cache does not have either, its cache begins later, with its positions shifted.

Shape suffixes: T rows, R rows whose logits are wanted, W feature width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foretell.attention import Batch, Segment, attend, pack
from foretell.cache import KVArena, KVCache, Lease
from foretell.drafters.base import DraftRequest, Observed, reserved
from foretell.drafters.grow import Candidate, Growth, Shape
from foretell.drafters.lent import LentHead
from foretell.heads.base import FeatureHead, layer_output
from foretell.heads.ready import block_pass, form_for, make_ready
from foretell.kernels import HeadSpec, kernels_for
from foretell.models.base import TargetModel
from foretell.models.rope import RopeTable
from foretell.types import EMPTY_TREE, DraftTree, StepPlan

_log = logging.getLogger(__name__)
_CHUNK = 512  # rows of a request that one pass computes
_MOST = 4096  # states of a request that may wait


class HeadRunner:
    """One pass of a head over packed rows.

    Args:
        head: as it was loaded; it is made ready to run.
        target: lends its embedding and output head where the head has none.
        slots: tokens that the head's cache holds.
        weights: how its matrices are kept; see `foretell.heads.ready`.
    """

    def __init__(self, head: FeatureHead, target: TargetModel, slots: int, weights: str) -> None:
        device, dtype = target.device, target.dtype
        form = form_for(weights, device, dtype)
        assert isinstance(head, nn.Module)
        make_ready(head, device, dtype, form)
        self.head: FeatureHead = head
        self._target = target
        self.arena = KVArena(1, head.kv_heads, head.dim, slots, dtype, device)
        self._spec = HeadSpec(head.heads, head.kv_heads, head.dim, head.scale, head.window)
        self._kernels = kernels_for(device, dtype, (head.dim,))
        self._rope = RopeTable(head.rope, head.rotated, device)
        self._whole = block_pass(head.block, self._spec, self._kernels)
        self.lent = LentHead(target, head.target_ids, form)

    @torch.inference_mode()
    def forward(self, batch: Batch, feature_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, W] for the next rows, and logits [R, V] of `batch.logit_R`; see `LentHead.rank`."""
        table = self._rope.upto(batch.positions)
        embed_TW = self._embed(batch)
        if self._whole is None:
            out_TW = self._step(embed_TW, feature_TW, table, batch)
        else:
            x_TW, input_TI = self.head.joined(embed_TW, feature_TW)
            cache, window = (self.arena.keys_LKSD, self.arena.values_LKSD), self._spec.window
            seen = {window: batch.seen(window)}
            out_TW = self._whole(x_TW.clone(), table, batch.position_T, cache, seen, {}, {}, input_TI)
        return self.head.feedback(out_TW), self._logits(out_TW[batch.logit_R])

    def _step(
        self, embed_TW: Tensor, feature_TW: Tensor, table: tuple[Tensor, Tensor], batch: Batch
    ) -> Tensor:
        """The layer, operation by operation."""
        angles = table[0][batch.position_T], table[1][batch.position_T]

        def mix(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            return attend(0, q_THD, k_TKD, v_TKD, batch, self._spec, self._kernels)

        return layer_output(self.head, embed_TW, feature_TW, angles, mix)

    def _embed(self, batch: Batch) -> Tensor:
        if self.head.embedding is None:
            embed_TW = self._target.embed(batch.token_T)
        else:
            embed_TW = self.head.embedding(batch.token_T).to(self.arena.keys_LKSD.dtype)
        if self.head.zero_first:
            embed_TW = embed_TW.masked_fill((batch.position_T == 0)[:, None], 0)
        return embed_TW

    def _logits(self, out_RW: Tensor) -> Tensor:
        if not len(out_RW):
            return out_RW.new_empty(0, 0)
        own_RV = self.head.logits(out_RW)
        return self.lent(self.head.normed(out_RW)) if own_RV is None else own_RV


@dataclass(frozen=True, slots=True)
class _States:
    """What the target has seen at some tokens: the states that the head needs, [rows, W] each."""

    count: int
    hidden_TW: Tensor | None
    aux_TW: Mapping[int, Tensor]

    def since(self, first: int) -> _States:
        """Those from the given one on, if there are so many."""
        hidden_TW = None if self.hidden_TW is None else self.hidden_TW[first:]
        return _States(
            max(0, self.count - first), hidden_TW, {n: rows_TW[first:] for n, rows_TW in self.aux_TW.items()}
        )


@dataclass(slots=True)
class _State:
    """A request in the head's cache: slot j holds the row at position `shift` + j.

    Attributes:
        keys: what each slot was computed from, for prefix reuse; the lease's own list.
        waiting: the target's states at the positions behind the lease's length.
    """

    keys: list[int]
    lease: Lease
    shift: int = 0
    waiting: list[_States] = field(default_factory=list)

    def begin_at(self, start: int) -> None:
        """States before `start` were left out by a prefix hit: the cache begins there."""
        self.shift, self.waiting, self.lease.length = start, [], 0
        self.keys.clear()

    @property
    def unread(self) -> int:
        """Rows that can be computed."""
        return sum(states.count for states in self.waiting)

    @property
    def known(self) -> int:
        """Tokens of the request whose states have come."""
        return self.shift + self.lease.length + self.unread

    def take(self, most: int) -> list[_States]:
        """The first states that wait, so many at most; what came together stays together."""
        count, taken = self.waiting[0].count, 1
        while taken < len(self.waiting) and count + self.waiting[taken].count <= most:
            count += self.waiting[taken].count
            taken += 1
        first, self.waiting = self.waiting[:taken], self.waiting[taken:]
        return first


@dataclass(slots=True)
class _Draft:
    """A tree under construction; `feature_PW` are the head's outputs for placed candidates, row 0 for the
    root."""

    request: DraftRequest
    state: _State
    growth: Growth
    outputs: list[Tensor] = field(default_factory=list)
    newest: list[Candidate] = field(default_factory=list)


class FeatureDrafter:
    """See `Drafter`.

    Args:
        runner: the head.
        shape: of its trees; may be changed between drafts.
        scratch: rows of a draft that its cache holds beside a request.
        draft_tokens: see `Drafter`.
        min_prob: least confidence of a drafted token.
    """

    expects = 0.05

    def __init__(
        self, runner: HeadRunner, shape: Shape, scratch: int, draft_tokens: int, min_prob: float = 0.0
    ) -> None:
        self.runner = runner
        self.needs = runner.head.needs
        self.draft_tokens = draft_tokens
        self._shape, self._scratch, self._min_prob = shape, scratch, min_prob
        self._cache = KVCache(runner.arena)
        self._states: dict[int, _State] = {}

    def start(self, request: DraftRequest) -> None:
        """Reserves room in the head's cache, with the rows that an earlier request has left there."""
        limit = self.runner.head.max_context
        if len(request.tokens) >= limit:
            _log.warning(
                "request %d gets no drafts: %d tokens, the head's context holds %d",
                request.id,
                len(request.tokens),
                limit,
            )
            return
        keys: list[int] = []
        _learn(keys, request.tokens, 0)
        lease = self._cache.reserve(keys, self._room(request), whole=True)
        if lease is None:
            _log.warning("request %d gets no drafts: the head's cache is full", request.id)
            return
        self._states[request.id] = _State(keys, lease)

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Takes the true states of tokens that the target has read."""
        if (state := self._states.get(request.id)) is None:
            return
        limit = self.runner.head.max_context
        if len(request.tokens) > limit:  # no draft will be made any more
            state.waiting.clear()
            return
        if seen.start > state.known:
            self._catch_up(state, seen.start)
        _learn(state.keys, request.tokens, state.shift)
        new = self._wanted(seen).since(state.known - seen.start)
        if new.count:
            state.waiting.append(new)
        while state.unread > _MOST and len(state.waiting) > 1 and self._fits(request, state):
            self._read([request], logits=False)

    def _wanted(self, seen: Observed) -> _States:
        hidden_TW = seen.hidden_TW if self.needs.last_hidden else None
        return _States(seen.count, hidden_TW, {n: seen.aux_TW[n] for n in self.needs.aux_layers})

    def _catch_up(self, state: _State, start: int) -> None:
        """The target has taken what is before `start` from another request: so does the head, where its cache
        holds it by now."""
        if not state.shift and not state.waiting:
            self._cache.extend(state.lease)
        if start > state.known:
            state.begin_at(start)

    def _room(self, request: DraftRequest) -> int:
        """Slots for the request, as far ahead as the target has reserved."""
        return min(reserved(request), self.runner.head.max_context) + self._scratch

    def _fits(self, request: DraftRequest, state: _State) -> bool:
        """Whether all rows that can be computed have slots; makes room for them where it can."""
        need = state.lease.length + state.unread + self._scratch
        if need > state.lease.capacity:
            self._cache.grow(state.lease, max(need, self._room(request)))
        return need <= state.lease.capacity

    def finish(self, request: DraftRequest) -> None:
        """Gives the request's slots back."""
        if state := self._states.pop(request.id, None):
            if state.shift:  # its rows have not seen the beginning of the text
                state.lease.length = 0
            self._cache.release(state.lease)

    def forget(self) -> None:
        """Drops the rows that finished requests have left."""
        self._cache.forget()

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """A tree per request, grown for all of them together."""
        drafts: dict[int, _Draft] = {}
        for request, plan in zip(requests, plans, strict=True):
            state = self._states.get(request.id)
            if state is None or not plan.draft_tokens or not self._ready(request, state):
                continue
            least = max(self._min_prob, plan.worth)
            limits = least, plan.pass_worth
            growth = Growth(self._shape, plan.draft_tokens, request.end_ids, *limits)
            drafts[request.id] = _Draft(request, state, growth)
        if drafts:
            self._plant(list(drafts.values()))
        while growing := [d for d in drafts.values() if self._expand(d)]:
            self._grow(growing)
        return [drafts[r.id].growth.tree() if r.id in drafts else EMPTY_TREE for r in requests]

    def _ready(self, request: DraftRequest, state: _State) -> bool:
        """Whether the states before the last token have just come, and the head's context has room."""
        complete = state.unread > 0 and state.known == len(request.tokens) - 1
        short = len(request.tokens) < self.runner.head.max_context
        return complete and short and self._fits(request, state)

    def _plant(self, drafts: list[_Draft]) -> None:
        """Computes the rows that wait, and what may follow the last token."""
        for draft in drafts:
            while draft.state.unread > _CHUNK and len(draft.state.waiting) > 1:
                self._read([draft.request], logits=False)
        feature_TW, logits_RV = self._read([d.request for d in drafts], logits=True)
        for draft, out_W, logits_V in zip(drafts, feature_TW, logits_RV, strict=True):
            draft.outputs.append(out_W)
            width = draft.growth.shape.width(())
            draft.growth.offer(None, self.runner.lent.rank(draft.request.sampler, logits_V, [], width))

    def _read(self, requests: Sequence[DraftRequest], *, logits: bool) -> tuple[Tensor, Tensor]:
        """Computes a chunk of each request's waiting rows: the output of its last one, and its logits."""
        segments, taken, last, row = [], [], [], 0
        for request in requests:
            state = self._states[request.id]
            start, first = state.lease.length, state.shift + state.lease.length + 1
            new = state.take(_CHUNK)
            count = sum(states.count for states in new)
            tokens = request.tokens[first : first + count]
            segments.append(Segment(state.lease.start, start, tokens, logits=logits, shift=state.shift))
            state.lease.length += count
            taken += new
            row += count
            last.append(row - 1)
        out_TW, logits_RV = self.runner.forward(pack(segments, self.runner.arena), self._features(taken))
        return out_TW[last], logits_RV

    def _features(self, taken: Sequence[_States]) -> Tensor:
        hidden = [states.hidden_TW for states in taken if states.hidden_TW is not None]
        aux_TW = {n: torch.cat([states.aux_TW[n] for states in taken]) for n in self.needs.aux_layers}
        return self.runner.head.features(torch.cat(hidden) if hidden else None, aux_TW)

    def _expand(self, draft: _Draft) -> bool:
        """Chooses the next level; False where the tree is done."""
        room = self._scratch - len(draft.growth.placed)
        depth = len(draft.newest[0].ranks) if draft.newest else 0
        if len(draft.request.tokens) + depth >= self.runner.head.max_context:
            return False
        draft.newest = draft.growth.next_level()
        assert len(draft.newest) <= room, "the shape outgrew the cache"
        return bool(draft.newest)

    def _grow(self, drafts: list[_Draft]) -> None:
        """Computes the rows of the newest level of every tree."""
        segments, features = [], []
        for draft in drafts:
            growth, state = draft.growth, draft.state
            stored = len(growth.placed) - len(draft.newest)
            tokens, parents = [c.token for c in growth.placed], growth.parents()
            segments.append(
                Segment(
                    state.lease.start,
                    state.lease.length,
                    (),
                    tokens,
                    parents,
                    stored=stored,
                    shift=state.shift,
                )
            )
            features += [draft.outputs[parent + 1] for parent in parents[stored:]]
        batch = pack(segments, self.runner.arena)
        out_TW, logits_RV = self.runner.forward(batch, torch.stack(features))
        row = 0
        for draft in drafts:
            for candidate in draft.newest:
                draft.outputs.append(out_TW[row])
                width = draft.growth.shape.width(candidate.ranks)
                ahead, sampler = draft.growth.ahead(candidate), draft.request.sampler
                draft.growth.offer(candidate, self.runner.lent.rank(sampler, logits_RV[row], ahead, width))
                row += 1


def _learn(keys: list[int], tokens: Sequence[int], shift: int) -> None:
    """Extends the keys of rows from position `shift` on. The first token has no row of its own, so the
    first key names it too. Rows of a shifted cache have not seen the beginning: their keys are no other
    request's."""
    new = list(tokens[shift + 1 + len(keys) :])
    if shift:
        new = [-1 - token for token in new]
    elif new and not keys:
        new[0] += (tokens[0] + 1) << 32
    keys += new
