"""When something that does not pay is tried all the same, to see whether it would by now, and by whom.

Looks come a few steps in a row. After them there is a pause, twice as long each time, and long enough that
looks take a small share of the time. In a batch only some of the requests look: what drafts cost and gain is
learned from them for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LOOKS = 3  # steps in a row that look at something
FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps until the next ones
_SHARE = 0.04  # of the time that looks may take
_DEAREST = 4.0  # plain steps that one look may count as: a machine that stands still says nothing
_EACH = 4  # one in so many requests looks


def size_class(batch: int) -> int:
    """Batches of one class are alike: 1, 2 and 3, 4 to 7, ..."""
    return batch.bit_length()


@dataclass(slots=True)
class Rest:
    """Pauses of what does not pay: a few looks, then a pause, twice as long each time."""

    looks: int = LOOKS
    left: int = 0
    pause: int = FIRST_PAUSE
    rested: int = 0  # steps since the last look
    least: int = FIRST_PAUSE  # shortest pause that the last looks were worth

    def anew(self) -> None:
        """Other text has come, of which nothing is known: looks now, unless the last ones are just over."""
        if self.looks == 0:
            self.left, self.pause = min(self.left, self.least - self.rested), FIRST_PAUSE

    def tick(self) -> bool:
        """Whether this step is a look."""
        if self.looks > 0:
            self.looks, self.rested = self.looks - 1, 0
            if self.looks == 0:
                self.left, self.pause = self.pause, min(2 * self.pause, _LONGEST_PAUSE)
            return True
        self.left, self.rested = self.left - 1, self.rested + 1
        if self.left <= 0:
            self.looks = LOOKS
        return False

    def priced(self, lost: float) -> None:
        """The looks that are just over have lost so many plain steps."""
        self.least = min(_LONGEST_PAUSE, max(FIRST_PAUSE, math.ceil(lost / _SHARE)))
        self.left = max(self.left, self.least)


@dataclass(slots=True)
class Looks:
    """Of a batch. `on`: whether this step is a look of the requests in `who`."""

    on: bool = False
    who: set[int] = field(default_factory=set)
    _rest: Rest = field(default_factory=Rest)
    _known: set[int] = field(default_factory=set)
    _new: float = 0.0  # requests that have come since all was new, as a share of the batch
    _size: int = 0  # class of the batch
    _lost: float = 0.0  # plain steps, in the looks in a row

    def begin(self, ids: Sequence[int], waiting: bool) -> None:
        """A step of these requests; `waiting`: some of them would not have drafted in the last one."""
        new = [request_id for request_id in ids if request_id not in self._known]
        self._known.update(new)
        self._new += len(new) / max(1, len(ids))
        shrunk, self._size = size_class(len(ids)) < self._size, size_class(len(ids))
        if shrunk or self._new >= 1:  # in a smaller batch, what did not pay may
            self._new = 0.0
            self._rest.anew()
        self.on = waiting and self._rest.tick()
        if self.on:  # those that have looked before have less to catch up with
            order = sorted(ids, key=lambda request_id: request_id not in self.who)
            self.who = set(order[: math.ceil(len(ids) / _EACH)])

    def observe(self, seconds: float, emitted: int, batch: int) -> None:
        """The step took so long, in plain steps of its batch."""
        if not self.on:
            return
        self._lost += min(_DEAREST, seconds) - emitted / batch
        if self._rest.looks == 0:
            self._rest.priced(self._lost)
            self._lost = 0.0

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._known.discard(request_id)
        self.who.discard(request_id)
