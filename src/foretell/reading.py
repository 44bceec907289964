"""What decoding reads of its history, by a user's settings: all, a selection, or both in two levels."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foretell.drafters import AttendingDrafter, Drafter
from foretell.drafters.sparse_target import Inner, SelfOptions, SparseTargetDrafter
from foretell.drafters.spec import Part
from foretell.engine.verification import verify as judge
from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.sparse import (
    KV_CHOICES,
    POLICIES,
    KVReader,
    Policy,
    Profile,
    choose,
    goes_by_profile,
    read_profile,
    shape_of,
)
from foretell.sparse.policies import LEAST_BUDGET
from foretell.verify import Rule

DEFAULT_KV_BUDGET = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings that hold together; see `settle`.

    Args:
        policy: None = everything is read.
        budget: tokens of the history.
        lossless: what the policy lets through is verified by a pass that reads everything.
        profile: the user's; None = a shipped one, where one fits.
    """

    policy: Policy | None
    budget: int
    lossless: bool
    profile: Profile | None

    def levels(self, loaded: LoadedModel, drafter: Drafter, rule: Rule) -> tuple[Drafter, KVReader | None]:
        """The drafter of the pass that emits, and what that pass reads (None = everything).

        Raises:
            InputError: the profile is of other models.
        """
        if self.policy is None:
            return drafter, None
        profile = self._profile(self.policy, loaded, drafter)
        reader = KVReader(self.policy, self.budget, loaded.model.num_layers, profile)
        if not self.lossless:
            return drafter, reader
        inner = Inner(drafter, partial(judge, rule), rule.invariant, rule.needs_q)
        middle = inner if drafter.draft_tokens else None
        return SparseTargetDrafter(loaded.model, reader, middle, loaded.name), None

    def _profile(self, policy: Policy, loaded: LoadedModel, drafter: Drafter) -> Profile | None:
        """That of the target and of what looks ahead for it: a draft, or itself."""
        if not goes_by_profile(policy):
            return None
        target = shape_of(loaded.model, loaded.name)
        looker = drafter.looker if isinstance(drafter, AttendingDrafter) else None
        if self.lossless and not drafter.draft_tokens:
            looker = target
        return choose(self.profile, target, looker)


def settle(
    kv: str,
    budget: int | None,
    lossless: bool,
    profile: str | os.PathLike[str] | Profile | None,
    parts: Sequence[Part],
) -> Reading:
    """Checks what is set, and warns of what has no effect.

    Args:
        kv, budget, lossless, profile: see `LLM`.
        parts: the drafters; none for one that is ready.

    Raises:
        InputError: a bad value, or a profile that cannot be read.
    """
    if kv not in KV_CHOICES:
        raise InputError(f"unknown kv {kv!r}", hint=f"one of: {', '.join(KV_CHOICES)}")
    if budget is not None and budget < LEAST_BUDGET:
        raise InputError(f"kv_budget must be at least {LEAST_BUDGET}, got {budget}")
    for name, given in (("kv_budget", budget is not None), ("lossless", lossless)):
        if kv == "full" and given:
            _log.warning("%s has no effect: kv is full", name)
    policy = None if kv == "full" else POLICIES[kv]
    names = "+".join(part.name for part in parts)
    if lossless and policy is not None and any(part.name == "self" for part in parts):
        raise InputError(
            f"drafter {names!r} cannot draft below kv {kv!r}: the target drafts for itself there",
            hint="leave out kv, or choose another drafter",
        )
    if profile is not None and not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    own = [POLICIES[part.options.kv] for part in parts if isinstance(part.options, SelfOptions)]
    if profile is not None and not any(each is not None and goes_by_profile(each) for each in (*own, policy)):
        _log.warning("kv_profile has no effect: kv is %s, which goes by no profile", kv)
    return Reading(policy, DEFAULT_KV_BUDGET if budget is None else budget, lossless, profile)
