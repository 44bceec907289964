"""A smaller model of the same vocabulary drafts (Leviathan et al. 2023; Chen et al. 2023).

All requests draft together, token by token, over the draft's own KV cache. `width` > 1 adds the
runners-up of each position as siblings: they cost the draft nothing and the target a row each.

Shape suffixes: R requests, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention import Segment, pack
from foretell.cache import KVCache, Lease
from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan

_log = logging.getLogger(__name__)

_CHUNK = 512  # tokens of a prompt that the draft reads in one pass


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Options of the draft-model drafter.

    Args:
        width: candidates per position; the first is followed, the others are leaves.
    """

    width: int = 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"width must be at least 1, got {self.width}")


@dataclass(slots=True)
class _State:
    """A request in the draft's cache. `ahead` are drafted tokens whose K and V lie behind the lease's
    length, waiting for the verdict."""

    lease: Lease
    ahead: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Growing:
    """A tree under construction: its stem is the chain that the draft follows."""

    request: DraftRequest
    state: _State
    budget: int
    stem: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_q: list[Tensor | None] = field(default_factory=lambda: [None])
    tip: int = -1

    def grow(self, drawn: list[int], log_q_V: Tensor | None) -> None:
        """Adds siblings at the tip and moves the tip to the first of them."""
        self.log_q[self.tip + 1] = log_q_V
        first = len(self.tokens)
        for token in drawn[: self.budget - len(self.tokens)]:
            self.tokens.append(token)
            self.parents.append(self.tip)
            self.log_q.append(None)
        self.tip = first
        self.stem.append(self.tokens[first])

    @property
    def open(self) -> bool:
        """Whether another position may be drafted: within the budget, the draft's context and the
        answer."""
        ended = bool(self.stem) and self.stem[-1] in self.request.end_ids
        fits = len(self.request.tokens) + len(self.stem) <= self.state.lease.capacity
        return len(self.tokens) < self.budget and fits and not ended

    def tree(self) -> DraftTree:
        drawn = any(row is not None for row in self.log_q)
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.log_q) if drawn else None)


class DraftModelDrafter:
    """See `Drafter`.

    Args:
        model: the draft.
        vocabulary: ids that draft and target share; logits beyond are padding and are cut.
        target_vocabulary: width of the target's logits.
        slots: tokens of all requests that the draft's cache holds.
    """

    needs = NO_NEEDS
    expects = 0.02
    draft_tokens = 5

    def __init__(
        self,
        model: TargetModel,
        vocabulary: int,
        target_vocabulary: int,
        slots: int,
        options: DraftModelOptions,
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._padding = target_vocabulary - vocabulary
        self._options = options
        self._cache = KVCache(model.new_arena(slots))
        self._states: dict[int, _State] = {}

    def start(self, request: DraftRequest) -> None:
        """Reserves room in the draft's cache. A prompt beyond the draft's context gets none: the
        request is decoded without drafts."""
        context = self._model.max_context
        if len(request.tokens) < context:
            lease = self._cache.reserve(request.tokens, min(request.capacity, context))
            if lease is not None:
                self._states[request.id] = _State(lease)
                return
            _log.warning("request %d gets no drafts: the draft's cache is full", request.id)
        else:
            length = len(request.tokens)
            _log.warning(
                "request %d gets no drafts: %d tokens, the draft's context holds %d",
                request.id,
                length,
                context,
            )

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """A chain with siblings per request, drafted for all of them together."""
        growing: dict[int, _Growing] = {}
        for request, plan in zip(requests, plans, strict=True):
            state = self._states.get(request.id)
            if state is None or not plan.draft_tokens:
                continue
            growing[request.id] = _Growing(request, state, plan.draft_tokens)
        while active := [g for g in growing.values() if g.open]:
            logits_RV = self._read(active)
            for g, logits_V in zip(active, logits_RV, strict=True):
                drawn, log_q_V = g.request.sampler.draw(logits_V, g.stem, self._options.width)
                if log_q_V is not None:
                    log_q_V = F.pad(log_q_V, (0, self._padding), value=-torch.inf)
                g.grow(drawn, log_q_V)
        return [growing[r.id].tree() if r.id in growing else EMPTY_TREE for r in requests]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Keeps the K and V of drafted tokens that were emitted, forgets the others."""
        if (state := self._states.get(request.id)) is None:
            return
        lease = state.lease
        for token in state.ahead:
            # the last token stays unread: its logits start the next draft
            if lease.length + 1 >= len(request.tokens) or request.tokens[lease.length] != token:
                break
            lease.length += 1
        state.ahead.clear()

    def finish(self, request: DraftRequest) -> None:
        """Gives the request's slots back."""
        if state := self._states.pop(request.id, None):
            self._cache.release(state.lease)

    def _read(self, active: list[_Growing]) -> Tensor:
        """The draft's logits [R, V] after each stem."""
        self._catch_up(active)
        segments = []
        for g in active:
            lease, ahead = g.state.lease, g.state.ahead
            unread = g.request.tokens[lease.length :] or g.stem[len(ahead) :]
            segments.append(Segment(lease.start, lease.length + len(ahead), self._known(unread)))
        output = self._model.forward(pack(segments, self._cache.arena))
        for g in active:
            g.state.lease.length = len(g.request.tokens)
            g.state.ahead = list(g.stem)
        return output.logits_RV[:, : self._vocabulary]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids that the draft has a row for: a padded target can emit others, which it reads as id 0."""
        return [token if token < self._model.vocab_size else 0 for token in tokens]

    def _catch_up(self, active: list[_Growing]) -> None:
        """Reads long prompts until at most one chunk is left."""
        while far := [g for g in active if len(g.request.tokens) - g.state.lease.length > _CHUNK]:
            segments = []
            for lease, tokens in ((g.state.lease, g.request.tokens) for g in far):
                part = self._known(tokens[lease.length : lease.length + _CHUNK])
                segments.append(Segment(lease.start, lease.length, part, logits=False))
            self._model.forward(pack(segments, self._cache.arena))
            for g in far:
                g.state.lease.length += _CHUNK


def build(context: DrafterContext, argument: str | None, options: DraftModelOptions) -> DraftModelDrafter:
    """See `DrafterEntry.build`.

    Raises:
        InputError: the draft's vocabulary is not the target's.
    """
    from foretell.models.load import load_model

    assert argument is not None
    draft = load_model(
        argument,
        device=str(context.target.device),
        allow_untested=context.allow_untested,
        report=context.report,
    )
    shared = min(draft.model.vocab_size, context.target.vocab_size)
    if context.tokenizer is not None:
        if not context.tokenizer.same_vocabulary(draft.tokenizer):
            raise InputError(
                f"draft model {argument} has another vocabulary ({draft.tokenizer.size} tokens) than the "
                f"target ({context.tokenizer.size} tokens)",
                hint="choose a draft of the same model family",
            )
        shared = min(shared, context.tokenizer.size)
    return DraftModelDrafter(draft.model, shared, context.target.vocab_size, context.slots, options)
