"""Which levels of a drafter draft: all of them, or the lowest alone, for the target directly.

A middle level (the target with few keys) pays where reading a history takes most of a step, and costs more
than it gains where weights do. That depends on context, batch, machine and text, so it is not predicted but
seen: what steps of either kind emitted in the time that they took. The kind that is not in use is looked at
now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.planner.looks import FIRST_PAUSE, LOOKS, Rest

_MEMORY, _OLD = 0.93, 0.75  # weight of the past per step of a kind: of the one in use, and in a look
_BETTER = 1.03  # what all levels together must make, of what the lowest makes alone
_NEXT = 8  # steps until levels that had nothing to add are asked again


@dataclass(slots=True)
class _Speed:
    """Tokens that steps of one kind emitted, the time that they took, and how many there were."""

    tokens: float = 0.0
    time: float = 0.0
    seen: int = 0

    @property
    def mean(self) -> float:
        return self.tokens / self.time if self.time else 0.0

    def observe(self, tokens: float, time: float, memory: float) -> None:
        self.tokens = memory * self.tokens + tokens
        self.time = memory * self.time + time
        self.seen += 1


class LevelChoice:
    """Chooses per step, for the whole batch. Without knowledge all levels go first."""

    def __init__(self) -> None:
        self._all, self._lowest = _Speed(), _Speed()
        self._rest = Rest()
        self._used_lowest = False
        self._nothing = False  # whether the others had nothing to add when they were asked last
        self.looking = False  # whether the last choice was made only to see what it brings

    def lowest(self) -> bool:
        """Whether the lowest level drafts alone in the next step."""
        self.looking = self._all.seen < LOOKS or self._lowest.seen < LOOKS
        if self.looking:
            return self._all.seen >= LOOKS
        best = self._all.mean < _BETTER * self._lowest.mean
        if best != self._used_lowest:
            self._used_lowest = best
            self._rest = Rest(looks=0, left=_NEXT if self._nothing else FIRST_PAUSE)
        self.looking = self._rest.tick()
        return best != self.looking

    def observe(self, *, lowest: bool, tried_all: bool, tokens: float, time: float) -> None:
        """A step is finished.

        Args:
            lowest: whether only the lowest level's drafts came.
            tried_all: whether all levels were asked. Where only the lowest's drafts came then, the others
                have nothing to add now.
            tokens: emitted.
            time: that it took, in units that do not depend on the batch.
        """
        memory = _OLD if self.looking else _MEMORY
        if lowest:
            self._lowest.observe(tokens, time, memory)
        if tried_all:
            self._all.observe(tokens, time, memory)
            self._nothing = lowest
        if lowest and tried_all:  # asking has cost nothing, and may bring more as histories grow
            self._rest = Rest(looks=0, left=_NEXT)
