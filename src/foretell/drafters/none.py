"""No drafter: plain decoding is an empty draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Takes no options."""


class NoDrafter:
    """Proposes nothing."""

    needs = NO_NEEDS
    expects = 0.0
    draft_tokens = 0

    def start(self, request: DraftRequest) -> None:
        """Nothing to do."""

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """Empty trees."""
        return [EMPTY_TREE for _ in requests]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Nothing to do."""

    def finish(self, request: DraftRequest) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """Nothing to do."""


def build(context: DrafterContext, argument: str | None, options: NoOptions) -> NoDrafter:
    """See `DrafterEntry.build`."""
    return NoDrafter()
