"""Who runs, with how many slots, and who reads how much in a step.

Requests are served in turn. A request is admitted with the slots that it needs soon, and its range grows
while it writes; where nothing is left, the one whose turn came last gives its range back, waits, and reads
its tokens again later. The one whose turn came first always goes on, so all of them end.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.cache import KVCache
from foretell.engine.request import Request
from foretell.errors import InputError

_AHEAD = 256  # tokens of an answer that slots are reserved for at a time
_PASSES = 8  # requests that may pass one that does not fit
_LOOKS = 8  # waiting requests that are asked whether they fit
_PATIENCE = 64  # steps that a request waits for slots before it takes another one's
_MIXED = 4  # share of a step's prompt rows, 1 / so many, while others are in the middle of their answers
_LEAST = 16  # rows of a prompt that are worth a place in a step
_WORTH = 32  # tokens of a common prefix that are worth waiting a step for


@dataclass(slots=True)
class Changes:
    """What a step begins with: requests that gave their slots back, then requests that got some."""

    put_back: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class Scheduler:
    """See the module.

    Args:
        cache: the target's cache.
        max_batch: requests that run at once.
        draft: slots that a draft takes behind a request's tokens.
        reuse: whether prefixes of other requests are copied.
        preempts: whether a request may be put back without changing its text. Where not, it is admitted with
            all the slots that it can ever need, and keeps them.
        again: tokens at the end of a found prefix that are read again.

    Attributes:
        running: in turn.
        waiting: in turn.
    """

    def __init__(
        self,
        cache: KVCache,
        max_batch: int,
        draft: int,
        *,
        reuse: bool = True,
        preempts: bool = True,
        again: int = 0,
    ) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._cache = cache
        self._max_batch = max_batch
        self._draft = draft
        self._reuse, self._again = reuse, again
        self._preempts = preempts
        self._turns = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InputError: it could never fit.
        """
        slots = self._cache.arena.slots
        if request.capacity > slots:
            raise InputError(
                f"the request needs {request.capacity} KV slots (prompt {request.prompt_length}, max_tokens "
                f"{request.params.max_tokens}, room for a draft), the cache has {slots}",
                hint="raise kv_tokens, or lower max_tokens",
            )
        self._queue(request)

    def begin(self) -> Changes:
        """Makes room for what runs, and admits who fits."""
        changes = Changes()
        for request in list(self.running):
            if request in self.running:
                self._grow(request, changes)
        self._admit(changes)
        if self._starving():
            self._make_way(self.waiting[0], changes)
        return changes

    def shares(self, most: int) -> list[tuple[Request, int]]:
        """Who takes part in the next step, each with the number of unread tokens that it reads.

        Args:
            most: tokens of prompts that all of them read together while nobody is answering yet.
        """
        answering = any(request.unread == 1 for request in self.running)
        budget = left = max(1, most // _MIXED) if answering else most
        shares: list[tuple[Request, int]] = []
        for request in self.running:
            if request.unread > 1 and (not left or self._better_later(request, [r for r, _ in shares])):
                continue
            rows = _portion(request.unread, left, first=left == budget) if request.unread > 1 else 1
            if not rows:
                continue
            if not request.begun:
                self._first(request)
            left -= rows if request.unread > 1 else 0
            shares.append((request, rows))
        return shares

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its slots back."""
        if request.lease is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._cache.release(request.lease)
        request.lease = None

    def _queue(self, request: Request) -> None:
        self._turns += 1
        request.turn = self._turns
        self.waiting.append(request)

    def _need(self, request: Request) -> int:
        """Slots that the next step may write to."""
        return min(request.capacity, len(request.tokens) + self._draft + 1)

    def _ask(self, request: Request) -> int:
        """Slots to reserve now."""
        return min(request.capacity, self._need(request) + _AHEAD) if self._preempts else request.capacity

    def _grow(self, request: Request, changes: Changes) -> None:
        assert request.lease is not None
        while request.lease is not None and request.lease.capacity < self._need(request):
            if not self._cache.grow(request.lease, self._ask(request)):
                self._put_back(self.running[-1], changes)

    def _put_back(self, request: Request, changes: Changes) -> None:
        self.remove(request)
        request.begun = False
        request.stats.preempted += 1
        changes.put_back.append(request)
        bisect.insort(self.waiting, request, key=lambda waiting: waiting.turn)

    def _admit(self, changes: Changes) -> None:
        place = 0
        while place < min(len(self.waiting), _LOOKS) and len(self.running) < self._max_batch:
            request = self.waiting[place]
            if self._reserve(request):
                if place:
                    self.waiting[0].passed += 1
                del self.waiting[place]
                bisect.insort(self.running, request, key=lambda running: running.turn)
                changes.admitted.append(request)
            elif self.waiting[0].passed < _PASSES and self.waiting[0].waited <= _PATIENCE:
                place += 1
            else:
                return

    def _reserve(self, request: Request) -> bool:
        request.lease = self._cache.reserve(
            request.tokens, self._ask(request), reuse=self._reuse, again=self._again
        )
        if request.lease is not None:
            request.waited = 0
        return request.lease is not None

    def _starving(self) -> bool:
        """Whether slots, and nothing else, have kept the first in the queue waiting for too long."""
        if not self._preempts or not self.waiting or len(self.running) >= self._max_batch:
            return False
        self.waiting[0].waited += 1
        return self.waiting[0].waited > _PATIENCE

    def _make_way(self, first: Request, changes: Changes) -> None:
        """The last in turn that has not made way before goes to the end of the queue."""
        able = [request for request in self.running if not request.made_way]
        if able:
            able[-1].made_way = True
            self._put_back(able[-1], changes)
            self.waiting.remove(able[-1])
            self._queue(able[-1])

    def _first(self, request: Request) -> None:
        """The request reads its first tokens, or reads them again."""
        assert request.lease is not None
        request.begun = True
        if not request.stats.preempted:
            request.stats.reused = request.lease.length

    def _better_later(self, request: Request, others: Sequence[Request]) -> bool:
        """Takes what others hold of the request's prompt, before it reads anything. Whether one of them is
        about to read more of it: then waiting a step saves reading it twice."""
        assert request.lease is not None
        if request.begun or not self._reuse:
            return False
        self._cache.extend(request.lease, again=self._again)
        return any(
            other.unread > 1 and _common(other.tokens, request.tokens) >= request.lease.length + _WORTH
            for other in others
        )


def _portion(unread: int, left: int, *, first: bool) -> int:
    """Rows that a request reads of the `left` ones of a step. A single token is never left over: whether a
    draft follows the prompt at once must not depend on how it was cut."""
    if unread <= left:
        return unread
    if left < _LEAST and not first:
        return 0
    return left - 1 if unread - left == 1 and left > 1 else left


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    most = min(len(one), len(other))
    return next((place for place in range(most) if one[place] != other[place]), most)
