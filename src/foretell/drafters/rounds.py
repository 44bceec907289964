"""What a level between two full passes remembers (`sparse_target.py`).

Shape suffixes: V vocabulary, N positions of the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.attention import Queries, Segment
from foretell.cache import Lease
from foretell.drafters.base import DraftRequest
from foretell.sampling import Sampler
from foretell.types import DraftTree, chain


@dataclass(slots=True)
class Ahead:
    """A copy of a request that runs ahead of it; see `DraftRequest`."""

    id: int
    tokens: list[int]
    capacity: int
    end_ids: frozenset[int]
    sampler: Sampler
    lease: Lease | None = None


@dataclass(slots=True)
class Round:
    """Drafting between two full passes.

    Attributes:
        pending: tokens that wait for the full pass; but for the last one their rows are stored already.
        selected: places of the history that are read.
        log_q: what each pending token was drawn from, where the rule reads it.
        looks: where watched, the queries that the pending tokens came from, per layer.
    """

    request: DraftRequest
    ahead: Ahead | None
    lease: Lease
    budget: int
    selected: Tensor
    pending: list[int] = field(default_factory=list)
    log_q: list[Tensor] = field(default_factory=list)
    looks: list[Mapping[int, Queries]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether another token may be drafted."""
        ended = bool(self.pending) and self.pending[-1] in self.request.end_ids
        return len(self.pending) < self.budget and not ended

    @property
    def past(self) -> int:
        """Rows stored so far: the history, and what was read of the round."""
        return self.lease.length + len(self.pending)

    def segment(self, tree: DraftTree) -> Segment:
        """The last token and a draft behind it, over the selection and everything that waits."""
        last = self.pending[-1] if self.pending else self.request.tokens[-1]
        read_N = torch.cat([self.selected, torch.arange(self.lease.length, self.past)])
        return Segment(self.lease.start, self.past, [last], tree.tokens, tree.parents, selected=read_N)

    def draft(self) -> DraftTree:
        """What the full pass verifies."""
        return chain(self.pending, self.log_q or None)
