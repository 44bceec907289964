"""What a planner is: it decides before each step how far every request speculates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foretell.types import DraftTree, StepPlan


class PlannedRequest(Protocol):
    """What a planner may see of a request. `remaining` tokens may still be emitted."""

    @property
    def id(self) -> int: ...
    @property
    def remaining(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a finished step did.

    Args:
        rows: rows of the forward pass; `prompt_rows` of them read prompts.
        proposed: tokens that the drafter proposed, whether or not they were verified.
        draft_s, target_s, verify_s, rest_s: its seconds.
        judged: per request, its id, the draft and the accepted nodes.
    """

    rows: int
    prompt_rows: int
    proposed: int
    draft_s: float
    target_s: float
    verify_s: float
    rest_s: float
    judged: Sequence[tuple[int, DraftTree, tuple[int, ...]]]


class Planner(Protocol):
    """Decides how many tokens to draft, and which of them to verify.

    Attributes:
        max_draft: nodes that a draft has at most.
    """

    max_draft: int

    def plan(self, requests: Sequence[PlannedRequest]) -> list[StepPlan]:
        """One plan per request, each with its reason."""
        ...

    def choose(
        self, requests: Sequence[PlannedRequest], trees: Sequence[DraftTree], rows: int
    ) -> list[DraftTree]:
        """The parts of the drafts that are verified; `rows` are computed without any draft."""
        ...

    def observe(self, report: StepReport) -> None:
        """A step is finished."""
        ...

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        ...
