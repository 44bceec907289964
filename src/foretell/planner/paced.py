"""Drafts that grow pass by pass and end where a further pass would not pay: what a pass costs, and what such
drafts gain."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.planner.looks import size_class

_MEMORY = 0.97  # weight of the past in every mean, per draft
_STIFF = 0.25  # variance of the passes, as if seen, along the line through the origin


@dataclass(slots=True)
class Gained:
    """Means over such drafts: nodes that were verified, tokens gained."""

    seen: bool = False
    nodes: float = 0.0
    gain: float = 0.0

    def judged(self, nodes: int, gained: int) -> None:
        """One draft was judged, `nodes` of it; none where nothing was worth verifying."""
        keep = _MEMORY if self.seen else 0.0
        self.nodes = keep * self.nodes + (1 - keep) * nodes
        hoped = gained if self.seen or not nodes else max(1, gained)
        self.gain = keep * self.gain + (1 - keep) * hoped
        self.seen = True


@dataclass(slots=True)
class Paced:
    """Means over such drafts: passes, their time, their products; and by size of the batch what they gained,
    for in a large one less is worth verifying. Time is in plain steps of as many requests as have drafted,
    which holds for other batches too."""

    passes: float = 0.0
    time: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    _gained: dict[int, Gained] = field(default_factory=dict)

    def of(self, batch: int) -> Gained:
        """What drafts gain in batches of about this size."""
        return self._gained.setdefault(size_class(batch), Gained())

    @property
    def per_pass(self) -> float:
        """Time of one more pass: the slope of a line through what was measured. As long as all drafts took
        as many passes, each costs its share."""
        if not self.passes:
            return 0.0
        variance = max(0.0, self.squares - self.passes**2)
        together = self.products - self.passes * self.time
        slope = (together + _STIFF * self.time / self.passes) / (variance + _STIFF)
        return max(0.0, slope)

    def drafted(self, passes: int, time: float) -> None:
        """One step's drafts were made; `passes` of the deepest."""
        keep = _MEMORY if self.passes else 0.0
        self.passes = keep * self.passes + (1 - keep) * passes
        self.time = keep * self.time + (1 - keep) * time
        self.squares = keep * self.squares + (1 - keep) * passes**2
        self.products = keep * self.products + (1 - keep) * passes * time
