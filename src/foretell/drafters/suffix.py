"""SuffixDecoding (Oliaro et al. 2025): continue as the longest repeated suffix was continued before.

Two sources: the request's own prompt and output, and a pool of finished outputs of other requests. A
continuation is followed while its probability stays above a floor: its share of what came next so far,
times a belief that grows with the length of the context (after one matching token it is right in a third of
all cases, after ten in nine of ten). The better of the two sources wins by score, the expected number of
accepted tokens.

Reading and proposing cost a few microseconds per token, whatever the length of the history. The pool keeps
a byte limit: it consists of two generations, and when the younger is full it replaces the older.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretell.drafters.automaton import ROOT, Cursor, SuffixAutomaton
from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.errors import InputError
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan

_CHECK_EVERY = 64  # tokens between two looks at the pool's size
# A context of L tokens continues as before with chance L / (L + 1.7): fitted to 120 prompts of six tasks
# (docs/log.md, 2026-11-30). What is left of it after calibration is the planner's business.
_DOUBT = 1.7


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """Options of the suffix drafter.

    Args:
        factor, offset: draft at most factor * matched tokens + offset.
        min_prob: follow a continuation while the probability of its path is at least this.
        depth: longest match that counts.
        levels: matches that are tried, from the longest down.
        pool_mb: limit of the pool of finished outputs; 0 = no pool.
    """

    factor: float = 4.0
    offset: float = 0.0
    min_prob: float = 0.05
    depth: int = 64
    levels: int = 3
    pool_mb: float = 64.0

    def __post_init__(self) -> None:
        checks = {
            "factor": (0 <= self.factor < math.inf, "0 or above"),
            "offset": (math.isfinite(self.offset), "a finite number"),
            "min_prob": (0 <= self.min_prob <= 1, "between 0 and 1"),
            "depth": (self.depth >= 1, "at least 1"),
            "levels": (self.levels >= 1, "at least 1"),
            "pool_mb": (self.pool_mb == 0 or 1 <= self.pool_mb < math.inf, "0 (off) or at least 1"),
        }
        for name, (ok, want) in checks.items():
            if not ok:
                raise InputError(f"{name} must be {want}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Continuation:
    """A draft from one source, with the probability of each node's path. `score`, their sum, is what it is
    expected to gain."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        return sum(self.confidence)


NOTHING = Continuation()


class Pool:
    """Finished outputs of many requests under a byte limit.

    Args:
        limit: bytes that both generations together never exceed.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.generations = [SuffixAutomaton()]

    def clear(self) -> None:
        """Forgets every text."""
        self.generations = [SuffixAutomaton()]

    @property
    def nbytes(self) -> int:
        return sum(automaton.nbytes for automaton in self.generations)

    def add(self, tokens: Sequence[int]) -> None:
        """Reads one text; forgets the oldest ones where that is needed for room."""
        self.generations[-1].begin()
        for start in range(0, len(tokens), _CHECK_EVERY):
            # a token makes at most two states; this is room for them at their largest
            if self.generations[-1].nbytes > self._half - _CHECK_EVERY * 2048:
                self.generations = [self.generations[-1], SuffixAutomaton()]
            for token in tokens[start : start + _CHECK_EVERY]:
                self.generations[-1].read(token)


@dataclass(slots=True)
class _History:
    """What a request has read: its own automaton, and where it stands in the pool's."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    read: int = 0
    cursors: list[Cursor] = field(default_factory=list)
    prompt_length: int = 0


class SuffixDrafter:
    """See `Drafter`. `score` of the last proposals is kept for combinations with other drafters."""

    needs = NO_NEEDS
    expects = 0.0
    draft_tokens = 16

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self.pool = Pool(int(options.pool_mb * 1e6)) if options.pool_mb else None
        self._histories: dict[int, _History] = {}

    def start(self, request: DraftRequest) -> None:
        """Begins a history; the prompt is read at the first proposal."""
        self._histories[request.id] = _History(prompt_length=len(request.tokens))

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """The best continuation per request."""
        return [tree for tree, _ in self.propose_scored(requests, plans)]

    def propose_scored(
        self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]
    ) -> list[tuple[DraftTree, float]]:
        """Trees with their scores, the tokens that each is expected to gain."""
        out = []
        for request, plan in zip(requests, plans, strict=True):
            if not plan.draft_tokens:  # reading can wait, too: a burst of it costs less
                out.append((EMPTY_TREE, 0.0))
                continue
            history = self._histories[request.id]
            self._catch_up(history, request.tokens)
            best = self._best(history, plan, request.end_ids)
            tree = DraftTree(best.tokens, best.parents, confidence=best.confidence)
            out.append((tree, best.score))
        return out

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """The history catches up at the next proposal."""

    def finish(self, request: DraftRequest) -> None:
        """Gives the output to the pool, led in by the end of the prompt."""
        history = self._histories.pop(request.id, None)
        if history is not None and self.pool is not None and len(request.tokens) > history.prompt_length:
            self.pool.add(request.tokens[max(0, history.prompt_length - self._options.depth) :])

    def forget(self) -> None:
        """Empties the pool."""
        if self.pool is not None:
            self.pool.clear()

    def _catch_up(self, history: _History, tokens: Sequence[int]) -> None:
        new = tokens[history.read :]
        for token in new:
            history.own.read(token)
        self._follow_pool(history, tokens, new)
        history.read = len(tokens)

    def _follow_pool(self, history: _History, tokens: Sequence[int], new: Sequence[int]) -> None:
        """Moves the cursors along; a new generation's begins with the last tokens."""
        if self.pool is None:
            return
        known = {id(cursor.automaton): cursor for cursor in history.cursors}
        history.cursors = []
        for automaton in self.pool.generations:
            cursor = known.get(id(automaton))
            if cursor is None:
                cursor = Cursor(automaton, self._options.depth)
                cursor.follow(tokens[-self._options.depth :])
            else:
                cursor.follow(new)
            history.cursors.append(cursor)

    def _best(self, history: _History, plan: StepPlan, end_ids: frozenset[int]) -> Continuation:
        own = history.own
        state = own.repeated
        best = self._continue(own, state, min(own.length(state), self._options.depth), plan, end_ids)
        for cursor in history.cursors:
            other = self._continue(cursor.automaton, *cursor.match(), plan, end_ids)
            if other.score > best.score:
                best = other
        return best

    def _continue(
        self, automaton: SuffixAutomaton, state: int, matched: int, plan: StepPlan, end_ids: frozenset[int]
    ) -> Continuation:
        """The best-scoring continuation of a match and of its suffixes; ties go to the longer match."""
        options, best = self._options, NOTHING
        least = max(options.min_prob, plan.worth)
        for _ in range(options.levels):
            if state == ROOT or _belief(matched) < least:
                break
            limit = min(plan.draft_tokens, int(options.factor * matched + options.offset))
            found = _grow(automaton, state, matched, limit, least, end_ids)
            if found.score > best.score:
                best = found
            if best.score > options.factor * automaton.length(automaton.shorter(state)) + options.offset:
                break  # a shorter match may not even draft so many
            state = automaton.shorter(state)
            matched = automaton.length(state)
        return best


def _belief(context: int) -> float:
    """The chance that a context of so many tokens goes on in a way that it went on before."""
    return context / (context + _DOUBT)


def _followers(automaton: SuffixAutomaton, state: int) -> list[tuple[float, int, int]]:
    """(share, token, state behind) of each continuation. Where the text ends, the longest suffix that went
    on elsewhere decides, so a repetition can be followed beyond its end."""
    while not (found := automaton.continuations(state)) and state != ROOT:
        state = automaton.shorter(state)
    return found if state != ROOT else []


def _grow(
    automaton: SuffixAutomaton,
    state: int,
    matched: int,
    limit: int,
    min_prob: float,
    end_ids: frozenset[int],
) -> Continuation:
    """The likeliest continuations side by side, the best first."""
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # -probability, token, state, parent, context
    above, parent, context = -1.0, -1, matched
    while len(tokens) < limit:
        belief = above * _belief(context)
        for share, token, behind in _followers(automaton, state):
            if -belief * share >= min_prob:
                heapq.heappush(waiting, (belief * share, token, behind, parent, context + 1))
        while waiting:
            above, token, state, node, context = heapq.heappop(waiting)
            parent = len(tokens)
            tokens.append(token)
            parents.append(node)
            confidence.append(-above)
            if token not in end_ids or len(tokens) == limit:
                break
        else:
            break
    return Continuation(tuple(tokens), tuple(parents), tuple(confidence))


def build(context: DrafterContext, argument: str | None, options: SuffixOptions) -> SuffixDrafter:
    """See `DrafterEntry.build`."""
    if not context.learning and options.pool_mb:
        options = replace(options, pool_mb=0)
    return SuffixDrafter(options)
