"""What a step took, and what it is booked on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.engine.request import Request
from foretell.stats import StepStats

_log = logging.getLogger(__name__)
_DRAFTS_BEFORE_ALARM = 50


@dataclass(slots=True)
class Clock:
    """Seconds of the phases of one step."""

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """A phase has ended."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


class Accounts:
    """Totals over all requests.

    Args:
        expects: see `Drafter`.
    """

    def __init__(self, expects: float) -> None:
        self.stats = StepStats()
        self._expects = expects
        self._alarmed = False

    def book(self, running: Sequence[Request], clock: Clock) -> None:
        """Books the step's seconds; each request is charged for the whole step, which it waited for."""
        for request in running:
            if request.stats.steps <= 1:
                request.stats.prefill_s += sum(clock.laps.values())
        for stats in (*(r.stats for r in running if r.stats.steps > 1), self.stats):
            for name, seconds in clock.laps.items():
                setattr(stats, name, getattr(stats, name) + seconds)
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        """A drafter that is almost never right is mis-wired, which nothing else would show."""
        stats = self.stats
        if self._alarmed or stats.drafts < _DRAFTS_BEFORE_ALARM or not stats.accepted_at:
            return
        if stats.marginal[0] < self._expects:
            self._alarmed = True
            _log.warning(
                "only %.1f %% of the drafts' first tokens were accepted (%d drafts): the drafter does not "
                "fit this target; the output is right, but speculation costs time",
                100 * stats.marginal[0],
                stats.drafts,
            )
