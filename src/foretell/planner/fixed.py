"""The same draft length for everybody."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.planner.base import PlannedRequest, StepReport
from foretell.types import DraftTree, StepPlan


class FixedPlanner:
    """Drafts `draft_tokens` tokens, or as many as the answer may still have but one: the target adds
    that one itself."""

    def __init__(self, draft_tokens: int) -> None:
        self.max_draft = draft_tokens

    def plan(self, requests: Sequence[PlannedRequest]) -> list[StepPlan]:
        """See `Planner.plan`."""
        return [self._plan(request.remaining - 1) for request in requests]

    def choose(
        self, requests: Sequence[PlannedRequest], trees: Sequence[DraftTree], rows: int
    ) -> list[DraftTree]:
        """All of them."""
        return list(trees)

    def observe(self, report: StepReport) -> None:
        """Nothing is learned."""

    def forget(self, request_id: int) -> None:
        """Nothing was kept."""

    def _plan(self, room: int) -> StepPlan:
        if self.max_draft == 0:
            return StepPlan(0, "speculation is off")
        if room < self.max_draft:
            return StepPlan(room, f"{room} tokens may still be drafted")
        return StepPlan(self.max_draft, f"fixed at {self.max_draft}")
