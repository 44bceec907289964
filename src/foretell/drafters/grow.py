"""Growing a draft tree level by level, where a drafter must run to see what may follow a token.

A `Growth` holds the candidates of one request: tokens with the confidence that the target will come to
them, the product of the drafter's probabilities along the path. Two shapes: `BestFirst` (EAGLE-2, Li et al.
2024, section 4) expands the most confident of each level and keeps the most confident overall; `Fixed` is a
given tree of ranks (EAGLE-1, MEDUSA).

The draft is deterministic, which every acceptance rule treats exactly for any tree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from foretell.errors import InputError
from foretell.types import DraftTree

Ranks = tuple[int, ...]  # rank of each token among its siblings, from the root down


@dataclass(eq=False, slots=True)
class Candidate:
    """A token that may be drafted. `index` is its own, `above` that of the candidate before it, -1 = the
    root; `place` its node in the drafter's own cache once it was expanded."""

    token: int
    index: int
    above: int
    score: float
    ranks: Ranks
    place: int = -1


class Shape(Protocol):
    """Which candidates are looked at, expanded and kept."""

    def width(self, ranks: Ranks) -> int:
        """How many followers of this candidate are looked at."""
        ...

    def expand(self, level: Sequence[Candidate], known: Sequence[Candidate], budget: int) -> list[Candidate]:
        """Those of the newest level whose followers are looked at next."""
        ...

    def admits(self, ranks: Ranks) -> bool:
        """Whether a candidate of these ranks belongs to the shape."""
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The most confident of each level, down to `depth`; `top_k` followers of each are looked at."""

    depth: int
    top_k: int

    def width(self, ranks: Ranks) -> int:
        """See `Shape`."""
        return self.top_k

    def admits(self, ranks: Ranks) -> bool:
        """See `Shape`."""
        return True

    def expand(self, level: Sequence[Candidate], known: Sequence[Candidate], budget: int) -> list[Candidate]:
        """Only those that are among the best `budget` so far: a follower never scores above the one
        before it, so what follows the others cannot be drafted."""
        if not level or len(level[0].ranks) >= self.depth:
            return []
        floor = sorted((c.score for c in known), reverse=True)[:budget][-1]
        hopeful = [c for c in level if c.score >= floor]
        return sorted(hopeful, key=lambda c: -c.score)[: self.top_k]


class Fixed:
    """A given tree.

    Args:
        paths: ranks from the root down; every path's beginnings must be there too.

    Raises:
        InputError: a path's beginning is missing, or an entry is no rank.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = [tuple(path) for path in paths]
        self._known = set(self.paths)
        if not self.paths or len(self._known) != len(self.paths):
            raise InputError("a draft tree needs paths, each of them once")
        for path in self.paths:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise InputError(
                    f"a path of a draft tree must be a list of ranks from 0 on, got {list(path)}"
                )
            if len(path) > 1 and path[:-1] not in self._known:
                raise InputError(f"the draft tree has {list(path)} but not {list(path[:-1])}")
        self._width: dict[Ranks, int] = {}
        for path in self.paths:
            self._width[path[:-1]] = max(self._width.get(path[:-1], 0), path[-1] + 1)

    def width(self, ranks: Ranks) -> int:
        """See `Shape`."""
        return self._width.get(ranks, 0)

    def admits(self, ranks: Ranks) -> bool:
        """See `Shape`."""
        return ranks in self._known

    def expand(self, level: Sequence[Candidate], known: Sequence[Candidate], budget: int) -> list[Candidate]:
        """Those that have followers in the tree, within the budget."""
        return [c for c in level if self.width(c.ranks) and c.index < budget]


def read_paths(path: Path) -> list[list[int]]:
    """A tree from a JSON file: a list of paths of ranks, as in the MEDUSA and EAGLE repositories.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the draft tree {path} cannot be read: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        raise InputError(f"the draft tree {path} must be a JSON list of paths, such as [[0], [1], [0, 0]]")
    return value


@dataclass(slots=True)
class Growth:
    """The candidates of one request and how they become a tree.

    Args:
        shape: see above.
        budget: nodes that the tree may have.
        end_ids: tokens that nothing follows.
        min_prob: least confidence of a candidate.
        pass_worth: least confidence of a level's best candidate, if its followers are to be looked at.
    """

    shape: Shape
    budget: int
    end_ids: frozenset[int]
    min_prob: float = 0.0
    pass_worth: float = 0.0
    known: list[Candidate] = field(default_factory=list)
    placed: list[Candidate] = field(default_factory=list)
    _level: list[Candidate] = field(default_factory=list)

    def offer(self, above: Candidate | None, ranked: Sequence[tuple[int, float]]) -> None:
        """Followers of a candidate (None = the root): (token, log-probability), the likeliest first."""
        index, score, ranks = (-1, 0.0, ()) if above is None else (above.index, above.score, above.ranks)
        least = math.log(self.min_prob) if self.min_prob > 0 else -math.inf
        for rank, (token, log_prob) in enumerate(ranked):
            path = (*ranks, rank)
            if self.shape.admits(path) and score + log_prob >= least and log_prob > -math.inf:
                self.known.append(Candidate(token, len(self.known), index, score + log_prob, path))
                self._level.append(self.known[-1])

    def next_level(self) -> list[Candidate]:
        """The candidates to expand now; they are given places in the order in which they are returned."""
        level = [c for c in self._level if c.token not in self.end_ids]
        pays = level and math.exp(max(c.score for c in level)) >= self.pass_worth
        chosen = self.shape.expand(level, self.known, self.budget) if pays else []
        self._level = []
        for candidate in chosen:
            candidate.place = len(self.placed)
            self.placed.append(candidate)
        return chosen

    def ahead(self, candidate: Candidate) -> list[int]:
        """Tokens from the root to the candidate."""
        tokens = [candidate.token]
        while candidate.above >= 0:
            candidate = self.known[candidate.above]
            tokens.append(candidate.token)
        return tokens[::-1]

    def parents(self) -> list[int]:
        """Place of the candidate before each placed one; -1 = the root."""
        return [self.known[c.above].place if c.above >= 0 else -1 for c in self.placed]

    def tree(self) -> DraftTree:
        """The best candidates within the budget. What comes before a candidate scores no less and was
        known earlier, so it is in."""
        order = sorted(range(len(self.known)), key=lambda i: (-self.known[i].score, i))
        if isinstance(self.shape, Fixed):
            order = list(range(len(self.known)))
        kept = sorted(order[: self.budget])
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(self.known[i].token for i in kept),
            tuple(new[self.known[i].above] for i in kept),
            confidence=tuple(math.exp(min(0.0, self.known[i].score)) for i in kept),
            passes=1 + (len(self.placed[-1].ranks) if self.placed else 0),
        )
