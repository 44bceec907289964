"""A smaller model drafts (Leviathan et al. 2023; Chen et al. 2023), of the same vocabulary or another.

All requests draft together, token by token, over the draft's own KV cache. `width` > 1 adds the
runners-up of each position as siblings: they cost the draft nothing and the target a row each.

Across vocabularies (`translate.py`) the draft proposes tokens that both have; or, where those are few, it
writes text in its own tokens, which the target's tokenizer reads.

Shape suffixes: R requests, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from foretell.attention import Queries, Segment, pack
from foretell.cache import KVCache, Lease
from foretell.drafters.base import DrafterContext, DraftRequest, Observed, reserved
from foretell.drafters.translate import SameVocabulary, TokenMap, Translation
from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.tokenizer import Tokenizer
from foretell.sparse import Heads, ModelShape, draft_mass, shape_of, spread_layers, watching
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan, chain

_log = logging.getLogger(__name__)

_CHUNK = 512  # tokens of a prompt that the draft reads in one pass
_ENOUGH = 0.5  # share of the draft's tokens in common from which on they are enough
_WAYS = ("auto", "tokens", "text")


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Options of the draft-model drafter.

    Args:
        width: candidates per position; the first is followed, the others are leaves.
        across: between vocabularies: "tokens" (propose those in common), "text" (write text, read it with
            the target's tokenizer), "auto" (tokens where half of the draft's are common).
    """

    width: int = 1
    across: str = "auto"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"width must be at least 1, got {self.width}")
        if self.across not in _WAYS:
            raise InputError(f"across must be one of {', '.join(_WAYS)}, got {self.across!r}")


@dataclass(slots=True)
class _State:
    """A request in the draft's cache.

    Attributes:
        known: draft ids of the request's tokens, of which `translated` have been translated; the lease's
            own list.
        ahead: drafted ids whose K and V lie behind the lease's length, waiting for the verdict.
        looks: where watched, the queries that the last draft came from, per layer.
    """

    known: list[int]
    translated: int
    lease: Lease
    ahead: list[int] = field(default_factory=list)
    looks: list[dict[int, Queries]] = field(default_factory=list)


class _Growing(Protocol):
    """A draft under construction; `stem` are the draft's own ids that it follows."""

    request: DraftRequest
    state: _State
    stem: list[int]

    @property
    def open(self) -> bool:
        """Whether another position may be drafted."""
        ...

    def take(self, logits_U: Tensor) -> None:
        """Goes on from the draft's logits after the stem."""
        ...

    def tree(self) -> DraftTree:
        """What is proposed."""
        ...


@dataclass(slots=True)
class _Tokens:
    """A chain of target tokens with siblings."""

    request: DraftRequest
    state: _State
    budget: int
    width: int
    translation: Translation
    stem: list[int] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_q: list[Tensor | None] = field(default_factory=lambda: [None])
    confidence: list[float] = field(default_factory=list)
    tip: int = -1
    stuck: bool = False

    @property
    def open(self) -> bool:
        """Within the budget, the draft's cache and the answer."""
        ended = bool(self.followed) and self.followed[-1] in self.request.end_ids
        fits = len(self.state.known) + len(self.stem) <= self.state.lease.capacity
        return len(self.tokens) < self.budget and fits and not ended and not self.stuck

    def take(self, logits_U: Tensor) -> None:
        """Adds siblings at the tip and moves the tip to the first of them."""
        scores_V = self.translation.scores(logits_U)
        drawn, log_q_V = self.request.sampler.draw(scores_V, self.followed, self.width)
        if not drawn:  # what the draft could say is filtered out
            self.stuck = True
            return
        self.log_q[self.tip + 1] = None if log_q_V is None else self.translation.log_q(log_q_V)
        first = len(self.tokens)
        above = self.confidence[self.tip] if self.tip >= 0 else 1.0
        shares = (scores_V[drawn] - scores_V.logsumexp(0)).exp().tolist()
        self.confidence += [above * min(1.0, share) for share in shares[: self.budget - len(self.tokens)]]
        for token in drawn[: self.budget - len(self.tokens)]:
            self.tokens.append(token)
            self.parents.append(self.tip)
            self.log_q.append(None)
        self.tip = first
        self.followed.append(self.tokens[first])
        self.stem += self.translation.more(self.followed[-1:])

    def tree(self) -> DraftTree:
        """With what the tokens were drawn from, where the rule reads it."""
        drawn = any(row is not None for row in self.log_q)
        log_q = tuple(self.log_q) if drawn else None
        return DraftTree(tuple(self.tokens), tuple(self.parents), log_q, tuple(self.confidence))


@dataclass(slots=True)
class _Text:
    """The draft's likeliest text, as a chain of target tokens."""

    request: DraftRequest
    state: _State
    budget: int
    map: TokenMap
    stem: list[int] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Within the budget and the draft's cache."""
        fits = len(self.state.known) + len(self.stem) <= self.state.lease.capacity
        return len(self.stem) < self.budget and fits

    def take(self, logits_U: Tensor) -> None:
        """Follows the likeliest."""
        self.stem.append(int(logits_U.argmax()))

    def tree(self) -> DraftTree:
        """Deterministic: exact under every rule."""
        return chain(self.map.to_target(self.stem)[: self.budget])


class DraftModelDrafter:
    """See `Drafter`.

    Args:
        model: the draft.
        translation: from the target's tokens to its own.
        slots: tokens of all requests that the draft's cache holds.
        text: whether it writes text (`translation` must be a `TokenMap`).
        name: what the model was loaded as.
    """

    needs = NO_NEEDS
    expects = 0.02
    draft_tokens = 5

    def __init__(
        self,
        model: TargetModel,
        translation: Translation,
        slots: int,
        options: DraftModelOptions,
        *,
        text: bool = False,
        name: str = "",
    ) -> None:
        self._model = model
        self._name = name
        self._translation = translation
        self._options = options
        self._cache = KVCache(model.new_arena(slots))
        self._states: dict[int, _State] = {}
        self._watched: tuple[Heads, ...] = ()
        self._grower: Callable[[DraftRequest, _State, int], _Growing] = self._grower_of(text)

    def start(self, request: DraftRequest) -> None:
        """Reserves room in the draft's cache. A prompt beyond the draft's context gets none: the
        request is decoded without drafts."""
        context = self._model.max_context
        known = self._translation.prompt(request.tokens)
        if not 0 < len(known) < context:
            _log.warning(
                "request %d gets no drafts: %d tokens, the draft's context holds %d",
                request.id,
                len(known),
                context,
            )
            return
        lease = self._cache.reserve(known, self._room(request, len(known)))
        if lease is None:
            _log.warning("request %d gets no drafts: the draft's cache is full", request.id)
            return
        self._states[request.id] = _State(known, len(request.tokens), lease)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """A chain with siblings per request, drafted for all of them together."""
        growing: dict[int, _Growing] = {}
        for request, plan in zip(requests, plans, strict=True):
            state = self._states.get(request.id)
            if state is not None:
                state.looks.clear()
            if state is None or not plan.draft_tokens:
                continue
            if state.lease.capacity < (room := self._room(request, len(state.known))):
                self._cache.grow(state.lease, room)
            growing[request.id] = self._grower(request, state, plan.draft_tokens)
        while active := [g for g in growing.values() if g.open]:
            for g, logits_U in zip(active, self._read(active), strict=True):
                g.take(logits_U)
        return [growing[r.id].tree() if r.id in growing else EMPTY_TREE for r in requests]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Keeps the K and V of drafted tokens that were emitted, forgets the others."""
        if (state := self._states.get(request.id)) is None:
            return
        lease = state.lease
        state.known += self._translation.more(request.tokens[state.translated :])
        state.translated = len(request.tokens)
        for token in state.ahead:
            # the last token stays unread: its logits start the next draft
            if lease.length + 1 >= len(state.known) or state.known[lease.length] != token:
                break
            lease.length += 1
        # a token that is nothing to the draft adds no id; then its last one is read again
        lease.length = min(lease.length, len(state.known) - 1)
        state.ahead.clear()

    def retract(self, request: DraftRequest) -> None:
        """See `RetractingDrafter`; across vocabularies the ids of what stands are found anew."""
        if (state := self._states.get(request.id)) is None:
            return
        known, standing = self._translation.prompt(request.tokens), 0
        while standing < min(len(known), len(state.known)) and known[standing] == state.known[standing]:
            standing += 1
        state.known[:] = known
        state.translated = len(request.tokens)
        state.lease.length = min(state.lease.length, standing, len(known) - 1)
        state.ahead.clear()

    def finish(self, request: DraftRequest) -> None:
        """Gives the request's slots back."""
        if state := self._states.pop(request.id, None):
            self._cache.release(state.lease)

    def forget(self) -> None:
        """Drops the prefixes that finished requests have left."""
        self._cache.forget()

    @property
    def looker(self) -> ModelShape | None:
        """See `AttendingDrafter`; across vocabularies positions are not the target's."""
        same = isinstance(self._translation, SameVocabulary)
        return shape_of(self._model, self._name) if same else None

    def watch(self, heads: Sequence[Heads] = ()) -> bool:
        """See `AttendingDrafter`."""
        if self.looker is not None:
            self._watched = tuple(heads) or spread_layers(self._model.num_layers)
        return bool(self._watched)

    def draft_attention(self, request: DraftRequest, length: int) -> Tensor | None:
        """See `AttendingDrafter`."""
        if (state := self._states.get(request.id)) is None:
            return None
        return draft_mass(state.looks, self._watched, self._cache.arena, state.lease.start, length)

    def _room(self, request: DraftRequest, known: int) -> int:
        """Slots for a request of which so many ids are known: as far ahead as the target has reserved."""
        most = reserved(request) - len(request.tokens)
        return min(known + self._spread * most, self._model.max_context)

    @property
    def _spread(self) -> int:
        """Draft tokens that a target's token may become."""
        return 1 if isinstance(self._translation, SameVocabulary) else 2

    def _grower_of(self, text: bool) -> Callable[[DraftRequest, _State, int], _Growing]:
        width, translation = self._options.width, self._translation
        if text:
            assert isinstance(translation, TokenMap)
            mapping = translation
            return lambda request, state, budget: _Text(request, state, budget, mapping)
        return lambda request, state, budget: _Tokens(request, state, budget, width, translation)

    def _read(self, active: Sequence[_Growing]) -> Tensor:
        """The draft's logits [R, U] after each stem."""
        self._catch_up(active)
        segments = []
        for g in active:
            lease, ahead = g.state.lease, g.state.ahead
            unread = g.state.known[lease.length :] or g.stem[len(ahead) :]
            segments.append(Segment(lease.start, lease.length + len(ahead), unread))
        output = self._model.forward(pack(segments, self._cache.arena), watching(self._watched))
        row = -1
        for g, segment in zip(active, segments, strict=True):
            row += segment.rows
            last = {n: Queries(q.q_THD[row : row + 1], q.spec) for n, q in output.queries.items()}
            if last:
                g.state.looks.append(last)
            g.state.lease.length = len(g.state.known)
            g.state.ahead = list(g.stem)
        return output.logits_RV

    def _catch_up(self, active: Sequence[_Growing]) -> None:
        """Reads long prompts until at most one chunk is left."""
        while far := [g.state for g in active if len(g.state.known) - g.state.lease.length > _CHUNK]:
            segments = []
            for state in far:
                lease = state.lease
                part = state.known[lease.length : lease.length + _CHUNK]
                segments.append(Segment(lease.start, lease.length, part, logits=False))
            self._model.forward(pack(segments, self._cache.arena))
            for state in far:
                state.lease.length += _CHUNK


def build(context: DrafterContext, argument: str | None, options: DraftModelOptions) -> DraftModelDrafter:
    """See `DrafterEntry.build`.

    Raises:
        InputError: the draft cannot be loaded, or has no token in common with the target.
    """
    from foretell.models.load import load_model

    assert argument is not None
    draft = load_model(
        argument,
        device=str(context.target.device),
        weights=context.target.weights,
        allow_untested=context.allow_untested,
        report=context.report,
    )
    ours, theirs = draft.tokenizer, context.tokenizer
    sizes = draft.model.vocab_size, context.target.vocab_size
    if theirs is None or theirs.same_vocabulary(ours):
        if options.across != "auto":
            _log.warning("across has no effect: draft and target have the same vocabulary")
        same = SameVocabulary(min(*sizes, ours.size), *sizes)
        return DraftModelDrafter(draft.model, same, context.slots, options, name=draft.name)
    mapping, text = _across(argument, ours, theirs, context.target, options.across)
    if text and options.width > 1:
        _log.warning("width has no effect: the draft model drafts by text")
    slots = 2 * context.slots
    return DraftModelDrafter(draft.model, mapping, slots, options, text=text)


def _across(
    name: str, ours: Tokenizer, theirs: Tokenizer, target: TargetModel, way: str
) -> tuple[TokenMap, bool]:
    """The map between two vocabularies, and whether to go by text."""
    mapping = TokenMap(ours, theirs, target.vocab_size, target.device)
    common = len(mapping.draft_ids)
    if not common and way != "text":
        raise InputError(
            f"draft model {name} has no token in common with the target",
            hint="choose a draft of the same family, or set the option across to text",
        )
    text = way == "text" or (way == "auto" and common < _ENOUGH * ours.size)
    _log.warning(
        "draft model %s has another vocabulary: %d of its %d tokens are the target's too; it drafts by %s",
        name,
        common,
        ours.size,
        "text" if text else "tokens",
    )
    return mapping, text
