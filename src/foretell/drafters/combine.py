"""Two drafters that take turns: the first where it is sure of itself, the second elsewhere.

The first says what its draft is expected to gain (`ScoredDrafter`); it drafts where that beats what the
second's drafts have gained in this request so far. Both observe every step, so both stay in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foretell.cache import KVArena
from foretell.drafters.base import (
    AttendingDrafter,
    BorrowingDrafter,
    Drafter,
    DraftRequest,
    Observed,
    ScoredDrafter,
)
from foretell.sparse import Heads, ModelShape
from foretell.types import DraftTree, StepPlan

_MEMORY = 0.9  # weight of the past in the second drafter's mean gain, per draft
_PRIOR = 1.0  # tokens that its drafts are taken to gain before any was seen


class CombinedDrafter:
    """See `Drafter`. Every request has its own mean of what the second drafter's drafts gained."""

    def __init__(self, first: ScoredDrafter, second: Drafter) -> None:
        self._first, self._second = first, second
        self.needs = first.needs | second.needs
        self.expects = min(first.expects, second.expects)
        self.draft_tokens = max(first.draft_tokens, second.draft_tokens)
        self._gain: dict[int, float] = {}
        self._by_second: set[int] = set()

    def start(self, request: DraftRequest) -> None:
        """Starts it with both."""
        self._first.start(request)
        self._second.start(request)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """Per request, the draft of the one that is expected to gain more; where the second may not
        draft, the first's."""
        free = [replace(plan, draft_tokens=max(plan.draft_tokens, plan.free_tokens)) for plan in plans]
        scored = self._first.propose_scored(requests, free)
        sure = [
            score > self._gain.get(request.id, _PRIOR) or not plan.draft_tokens
            for request, (_, score), plan in zip(requests, scored, plans, strict=True)
        ]
        rest = [
            StepPlan(0, "the other drafter is sure") if first else plan
            for first, plan in zip(sure, plans, strict=True)
        ]
        trees = self._second.propose(requests, rest)
        self._by_second = {r.id for r, first in zip(requests, sure, strict=True) if not first}
        return [
            a if first else replace(b, origin=b.origin + 1)
            for first, (a, _), b in zip(sure, scored, trees, strict=True)
        ]

    def borrow(self, arena: KVArena) -> None:
        """See `BorrowingDrafter`: the second one may be."""
        if isinstance(self._second, BorrowingDrafter):
            self._second.borrow(arena)

    @property
    def looker(self) -> ModelShape | None:
        """See `AttendingDrafter`: the second one may be."""
        return self._second.looker if isinstance(self._second, AttendingDrafter) else None

    def watch(self, heads: Sequence[Heads] = ()) -> bool:
        """Has the second one watched."""
        return isinstance(self._second, AttendingDrafter) and self._second.watch(heads)

    def draft_attention(self, request: DraftRequest, length: int) -> Tensor | None:
        """Where the second's draft looks; None where the first drafted."""
        if request.id not in self._by_second or not isinstance(self._second, AttendingDrafter):
            return None
        return self._second.draft_attention(request, length)

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Shows it to both, and notes what the second's draft gained."""
        if seen.verdict is not None and len(seen.tree) and request.id in self._by_second:
            known = self._gain.get(request.id, _PRIOR)
            self._gain[request.id] = _MEMORY * known + (1 - _MEMORY) * len(seen.verdict.path)
        self._first.observe(request, seen)
        self._second.observe(request, seen)

    def finish(self, request: DraftRequest) -> None:
        """Ends it with both."""
        self._by_second.discard(request.id)
        self._gain.pop(request.id, None)
        self._first.finish(request)
        self._second.finish(request)

    def forget(self) -> None:
        """Both do."""
        self._first.forget()
        self._second.forget()
