"""Drafts that grow pass by pass and end where a further pass would not pay: what a pass costs, and what such
drafts gain."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.97  # weight of the past in every mean, per draft
_STIFF = 0.25  # variance of the passes, as if seen, along the line through the origin


@dataclass(slots=True)
class Paced:
    """Means over such drafts: passes, seconds, their products; nodes that were verified, tokens gained."""

    seen: bool = False
    passes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    nodes: float = 0.0
    gain: float = 0.0

    @property
    def per_pass(self) -> float:
        """Seconds of one more pass: the slope of a line through what was measured. As long as all drafts took
        as many passes, each costs its share."""
        if not self.passes:
            return 0.0
        variance = max(0.0, self.squares - self.passes**2)
        together = self.products - self.passes * self.seconds
        slope = (together + _STIFF * self.seconds / self.passes) / (variance + _STIFF)
        return max(0.0, slope)

    def drafted(self, passes: int, seconds: float) -> None:
        """One step's drafts were made; `passes` of the deepest."""
        keep = _MEMORY if self.passes else 0.0
        self.passes = keep * self.passes + (1 - keep) * passes
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.squares = keep * self.squares + (1 - keep) * passes**2
        self.products = keep * self.products + (1 - keep) * passes * seconds

    def judged(self, nodes: int, gained: int) -> None:
        """One such draft was judged, `nodes` of it; none where nothing was worth verifying."""
        keep = _MEMORY if self.seen else 0.0
        self.seen = True
        self.nodes = keep * self.nodes + (1 - keep) * nodes
        self.gain = keep * self.gain + (1 - keep) * (gained if keep else max(1, gained))
