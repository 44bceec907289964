"""What a planner is: it decides before each step how far every request speculates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foretell.types import StepPlan


class PlannedRequest(Protocol):
    """What a planner may see of a request. `remaining` tokens may still be emitted."""

    @property
    def id(self) -> int: ...
    @property
    def remaining(self) -> int: ...


class Planner(Protocol):
    """Decides how many tokens to draft."""

    max_draft: int

    def plan(self, requests: Sequence[PlannedRequest]) -> list[StepPlan]:
        """One plan per request, each with its reason."""
        ...
