"""What is compared: reading all keys, and every policy with every budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foretell.errors import InputError
from foretell.sparse import POLICIES, Policy
from foretell.sparse.policies import LEAST_BUDGET, Dustin, Signal

ORACLE = "oracle"
CHOICES = (*POLICIES, ORACLE)
_ORACLE = Dustin(1.0, "the target's true attention of the block that is being verified")


@dataclass(frozen=True, slots=True)
class Method:
    """A policy with a budget; without them all keys are read."""

    policy: str | None = None
    budget: int | None = None

    @property
    def name(self) -> str:
        return "full" if self.policy is None else f"{self.policy}@{self.budget}"

    @property
    def rule(self) -> Policy | None:
        """The policy; the oracle is one whose look-ahead is the truth."""
        if self.policy is None:
            return None
        return _ORACLE if self.policy == ORACLE else POLICIES[self.policy]

    @property
    def looks_ahead(self) -> bool:
        """Whether it goes by the attention of a draft."""
        rule = self.rule
        return isinstance(rule, Dustin) and rule.lookahead > 0 and self.policy != ORACLE


FULL = Method()


@dataclass(frozen=True, slots=True)
class Watch:
    """A policy that only watches: its signals are what others resume from. It never has to choose."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"history", "received"})
    about: str = "watches a prompt for other policies"

    def fill(self, signals: object, kept_N: Tensor, room: int) -> None:
        """See `Policy`."""
        raise AssertionError("the budget holds everything")


def methods(policies: Sequence[str] | None, budgets: Sequence[int]) -> list[Method]:
    """Full KV first, then every policy with every budget.

    Raises:
        InputError: an unknown policy, or a budget that is too small.
    """
    for name in policies or ():
        if name not in CHOICES:
            raise InputError(f"unknown --policy {name!r}", hint=f"one of: {', '.join(CHOICES)}")
    for budget in budgets:
        if budget < LEAST_BUDGET:
            raise InputError(f"--budget must be at least {LEAST_BUDGET}, got {budget}")
    chosen = dict.fromkeys(policies or CHOICES)
    return [FULL, *(Method(name, budget) for budget in dict.fromkeys(budgets) for name in chosen)]
