"""How often drafts are kept: per origin, by what the drafter itself thought, by depth, and per request.

Everything is a count with a prior, and old counts fade: text changes. A drafter's confidence is only a
feature here; what it is worth is measured (calibration).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from itertools import pairwise

from foretell.types import DraftTree

_EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)  # of confidence given the token before
_FADE = 0.98  # of a count, per observation in it
_IDLE = 0.996  # of every count, per step: what has not been tried for long is tried again
_TRUST, _GUESS = 10.0, 3.0  # weight of a prior, in observations: a drafter's confidence, and our guess
_DEEPEST = 64
_UNKNOWN = 0.55  # prior where a drafter has no opinion
_SPAN = 20.0  # expected tokens after which half of what a request showed is forgotten
_OTHERS = 3.0  # weight of the other requests in one request's factor, in tokens


@dataclass(slots=True)
class Share:
    """A share with a prior: `kept` of `seen`."""

    prior: float
    weight: float = _GUESS
    kept: float = 0.0
    seen: float = 0.0

    @property
    def mean(self) -> float:
        return (self.kept + self.weight * self.prior) / (self.seen + self.weight)

    def observe(self, kept: bool) -> None:
        """One more."""
        self.kept = _FADE * self.kept + kept
        self.seen = _FADE * self.seen + 1

    def fade(self) -> None:
        """A step has passed."""
        self.kept *= _IDLE
        self.seen *= _IDLE


@dataclass(slots=True)
class _Origin:
    """Counts of one drafter. `stale`: counts by depth have changed since their priors were set."""

    by_confidence: dict[int, Share] = field(default_factory=dict)
    by_depth: list[Share] = field(default_factory=list)
    stale: bool = False

    def given(self, confidence: float | None, depth: int) -> Share:
        """The share of tokens that were kept after the one before them was."""
        if confidence is None:
            return self.at(depth)
        place = bisect.bisect(_EDGES, confidence)
        if place not in self.by_confidence:
            low = _EDGES[place - 1] if place else 0.0
            high = _EDGES[place] if place < len(_EDGES) else 1.0
            self.by_confidence[place] = Share((low + high) / 2, _TRUST)
        return self.by_confidence[place]

    def at(self, depth: int) -> Share:
        """By depth alone, the first token's being 0. Where little was seen so deep, it is taken to be as one
        token before."""
        depth = min(depth, _DEEPEST - 1)
        while len(self.by_depth) <= depth:
            self.by_depth.append(Share(_UNKNOWN))
            self.stale = True
        if self.stale:
            for above, own in pairwise(self.by_depth):
                own.prior = above.mean
            self.stale = False
        return self.by_depth[depth]


class Acceptance:
    """What to expect of drafts.

    Requests differ: each has a factor, what it kept against what was expected of it.
    """

    def __init__(self) -> None:
        self._origins: dict[tuple[int, int], _Origin] = {}  # by levels and origin
        self._factors: dict[int, tuple[float, float]] = {}  # tokens kept, tokens expected

    def chances(self, request_id: int, tree: DraftTree) -> list[float]:
        """For every node, the chance that its whole path is kept."""
        factor = self.factor(request_id)
        return [min(0.999, chance * factor) for chance in self._plain(tree)]

    def factor(self, request_id: int) -> float:
        """How much better this request's drafts do than others'."""
        kept, expected = self._factors.get(request_id, (0.0, 0.0))
        return min(1.5, (kept + _OTHERS) / (expected + _OTHERS))

    def by_depth(self, length: int, levels: int = 1) -> list[float]:
        """The chance that a draft of so many levels is kept at least so deep, for depths 1 .. length. Of
        several drafters it is the last one's: those before it draft for free."""
        last = max((origin for own, origin in self._origins if own == levels), default=0)
        known = self._origins.setdefault((levels, last), _Origin())
        chance, out = 1.0, []
        for depth in range(length):
            chance *= known.at(depth).mean
            out.append(chance)
        return out

    def observe(self, request_id: int, tree: DraftTree, path: tuple[int, ...]) -> None:
        """A draft was judged."""
        if not len(tree):
            return
        known = self._origins.setdefault((tree.levels, tree.origin), _Origin())
        kept, expected = self._factors.get(request_id, (0.0, 0.0))
        promised = _expected(self._plain(tree), tree)
        keep = _SPAN / (_SPAN + promised)
        self._factors[request_id] = keep * kept + len(path), keep * expected + promised
        accepted = {-1, *path}
        reached: set[int] = set()
        for node, parent in enumerate(tree.parents):
            if parent in accepted:
                known.given(_given(tree, node), tree.depth(node) - 1).observe(node in accepted)
                reached.add(parent)
        if tree.confidence is not None:  # the depths' shares count drafts, not siblings
            for depth, parent in enumerate((-1, *path)):
                if parent in reached:
                    known.at(depth).observe(depth < len(path))
        known.stale = True

    def step(self) -> None:
        """A step has passed: what confidence is worth fades; depths are looked at again on purpose."""
        for origin in self._origins.values():
            for share in origin.by_confidence.values():
                share.fade()

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._factors.pop(request_id, None)

    def _plain(self, tree: DraftTree) -> list[float]:
        known = self._origins.setdefault((tree.levels, tree.origin), _Origin())
        out: list[float] = []
        depths: list[int] = []
        for node, parent in enumerate(tree.parents):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            above = out[parent] if parent >= 0 else 1.0
            out.append(above * known.given(_given(tree, node), depths[node]).mean)
        return out


def _given(tree: DraftTree, node: int) -> float | None:
    """The drafter's confidence in a token, given the one before it."""
    if tree.confidence is None:
        return None
    parent = tree.parents[node]
    above = tree.confidence[parent] if parent >= 0 else 1.0
    return tree.confidence[node] / above if above > 0 else 0.0


def _expected(chances: list[float], tree: DraftTree) -> float:
    """Tokens that a draft is expected to gain; siblings exclude each other, so at most one per depth."""
    by_depth: dict[int, float] = {}
    for node, chance in enumerate(chances):
        depth = tree.depth(node)
        by_depth[depth] = by_depth.get(depth, 0.0) + chance
    return sum(min(1.0, total) for total in by_depth.values())
