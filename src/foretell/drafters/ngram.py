"""Prompt lookup (Saxena 2023): what followed the last tokens before will follow them again.

The index grows by one entry per length and token, so a step costs a few dictionary look-ups however
long the context is. A longer match is trusted further. A match that reaches the end of the text goes
on into the draft itself, so a repetition is drafted to any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.drafters.tree import merge_chains
from foretell.errors import InputError
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Options of the n-gram drafter.

    Args:
        min_n, max_n: shortest and longest match, in tokens.
        trust: draft at most this many tokens per matched token.
        branches: different continuations, the latest first, that are tried side by side.
    """

    min_n: int = 2
    max_n: int = 8
    trust: int = 3
    branches: int = 1

    def __post_init__(self) -> None:
        for name in ("min_n", "trust", "branches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_n < self.min_n:
            raise InputError(f"max_n must be at least min_n ({self.min_n}), got {self.max_n}")


@dataclass(slots=True)
class _Index:
    """Where each n-gram was last followed by something; `read` tokens have been indexed."""

    read: int = 0
    after: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


class NgramDrafter:
    """See `Drafter`. Keeps one index per request, over its prompt and output."""

    needs = NO_NEEDS
    expects = 0.0
    draft_tokens = 8

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._indices: dict[int, _Index] = {}

    def start(self, request: DraftRequest) -> None:
        """Begins an index; the prompt is read at the first proposal."""
        self._indices[request.id] = _Index()

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """The continuations of the longest match of each request's last tokens."""
        return [
            self._draft(request, plan.draft_tokens) if plan.draft_tokens else EMPTY_TREE
            for request, plan in zip(requests, plans, strict=True)
        ]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """The index catches up at the next proposal."""

    def finish(self, request: DraftRequest) -> None:
        """Forgets the request."""
        self._indices.pop(request.id, None)

    def forget(self) -> None:
        """Finished requests leave nothing."""

    def _catch_up(self, index: _Index, tokens: Sequence[int]) -> None:
        """Indexes every n-gram that something follows: never the one at the very end, which would
        match itself."""
        options = self._options
        for end in range(index.read, len(tokens) - 1):
            for n in range(options.min_n, min(options.max_n, end + 1) + 1):
                gram = tuple(tokens[end + 1 - n : end + 1])
                index.after[gram] = (end + 1, *index.after.get(gram, ()))[: options.branches]
        index.read = max(index.read, len(tokens) - 1)

    def _draft(self, request: DraftRequest, budget: int) -> DraftTree:
        tokens, options, index = request.tokens, self._options, self._indices[request.id]
        self._catch_up(index, tokens)
        for n in range(min(options.max_n, len(tokens)), options.min_n - 1, -1):
            if places := index.after.get(tuple(tokens[-n:])):
                length = min(budget, n * options.trust)
                return merge_chains([_copy(tokens, place, length) for place in places], budget)
        return EMPTY_TREE


def _copy(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """`length` tokens from `place` on; beyond the end, from the copy itself."""
    out = list(tokens[place : place + length])
    period = len(tokens) - place
    while len(out) < length:
        out.append(out[len(out) - period])
    return out


def build(context: DrafterContext, argument: str | None, options: NgramOptions) -> NgramDrafter:
    """See `DrafterEntry.build`."""
    return NgramDrafter(options)
