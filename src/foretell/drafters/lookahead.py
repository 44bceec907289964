"""Lookahead decoding (Fu et al. 2024): the target guesses its own future in parallel, and remembers.

A window of Jacobi iterations runs beside verification: `window` columns are consecutive future positions,
`ngram` - 1 levels the latest iterations. Each step the target answers after every column, which finishes
one n-gram per column; those go to a pool, and the ones that begin with the request's last token are
verified. Window and candidates are one tree: the oldest iteration is a chain, column j's later ones hang
on its j-th node, so one mask serves both, and a window token that happens to be right is accepted too.

Guesses are the target's likeliest tokens, whatever the temperature: at temperature they match less often.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.drafters.tree import merge_chains
from foretell.errors import InputError
from foretell.types import EMPTY_TREE, DraftTree, Needs, StepPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Options of lookahead decoding; W, N and G of the paper.

    Args:
        window: future positions that are guessed side by side (W).
        ngram: length of the remembered n-grams (N); the window keeps N - 1 iterations.
        guesses: remembered n-grams that are verified per step (G).
        prompt: remember the prompt's n-grams too.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    prompt: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 3), ("guesses", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(slots=True)
class _Window:
    """A request's iterations and its pool.

    Attributes:
        levels: levels[i][j] guesses the token i + j after the request's last one; levels[0][0] stands
            for that token itself.
        age: steps of the window; before ngram - 2 of them some guesses are still made up.
        pool: first token -> what followed it, the latest last.
        tops: node of the latest iteration of each column of the last draft; -1 = the root.
        last: the request's last token when that draft was made.
        begun: whether a draft was made, and the prompt's n-grams are in the pool.
    """

    levels: list[list[int]]
    age: int = 0
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    tops: list[int] = field(default_factory=list)
    last: int = 0
    begun: bool = False


class LookaheadDrafter:
    """See `Drafter`."""

    needs = Needs(choices=True)
    expects = 0.0

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._windows: dict[int, _Window] = {}
        self._warned = False
        self.draft_tokens = (options.ngram - 1) * (options.window + options.guesses)

    def start(self, request: DraftRequest) -> None:
        """Fills the window with tokens of the prompt: Jacobi iteration may start anywhere."""
        pick, options = random.Random(len(request.tokens)), self._options
        levels = [pick.choices(request.tokens, k=options.window) for _ in range(options.ngram - 1)]
        self._windows[request.id] = _Window(levels)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """Remembered n-grams first, then as many columns of the window as fit."""
        return [
            self._draft(request, plan.draft_tokens) for request, plan in zip(requests, plans, strict=True)
        ]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Moves the window on by the target's answers."""
        window = self._windows[request.id]
        if window.tops and seen.verdict is not None:
            self._advance(window, [seen.choices[top + 1] for top in window.tops])
        window.tops = []

    def finish(self, request: DraftRequest) -> None:
        """Forgets the request."""
        self._windows.pop(request.id, None)

    def forget(self) -> None:
        """Finished requests leave nothing."""

    def _draft(self, request: DraftRequest, budget: int) -> DraftTree:
        window, options = self._windows[request.id], self._options
        window.tops = []
        if not budget:
            return EMPTY_TREE
        first = not window.begun
        if options.prompt and first:
            self._remember_text(window, request.tokens)
        window.begun = True
        window.last = request.tokens[-1]
        known = window.pool.get(window.last, [])[::-1]
        first_column = options.ngram - 2
        if budget < first_column and first and not self._warned:
            self._warned = True
            _log.warning(
                "lookahead's window needs at least %d draft tokens, %d are allowed: only remembered n-grams "
                "are drafted",
                first_column,
                budget,
            )
        spare = max(budget // 2, budget - (options.ngram - 1) * options.window)
        tree = merge_chains(known, min(spare, max(0, budget - first_column)) or spare)
        return self._with_window(window, tree, budget)

    def _with_window(self, window: _Window, tree: DraftTree, budget: int) -> DraftTree:
        """Hangs as many columns as fit beside the candidates; each costs a node per level, but the
        first, whose oldest guess is the request's last token."""
        tokens, parents = list(tree.tokens), list(tree.parents)
        levels = len(window.levels)
        columns = min(self._options.window, (budget - len(tokens) + 1) // levels)
        below = -1
        for column in range(columns):
            if column:
                tokens.append(window.levels[0][column])
                parents.append(below)
                below = len(tokens) - 1
            top = below
            for level in window.levels[1:]:
                tokens.append(level[column])
                parents.append(top)
                top = len(tokens) - 1
            window.tops.append(top)
        return DraftTree(tuple(tokens), tuple(parents), whole=True)

    def _advance(self, window: _Window, answers: Sequence[int]) -> None:
        """Remembers the finished n-grams, and shifts the iterations by one."""
        made = len(answers)
        window.levels[0][0] = window.last
        if window.age >= self._options.ngram - 2:
            for column, answer in enumerate(answers):
                self._remember(window, [*(level[column] for level in window.levels), answer])
        newest = [*answers, *window.levels[-1][made:]]
        window.levels = [*window.levels[1:], newest]
        window.age += 1

    def _remember(self, window: _Window, gram: Sequence[int]) -> None:
        rest = tuple(gram[1:])
        entries = window.pool.setdefault(gram[0], [])
        if rest in entries:
            entries.remove(rest)
        entries.append(rest)
        del entries[: -self._options.guesses]

    def _remember_text(self, window: _Window, tokens: Sequence[int]) -> None:
        size = self._options.ngram
        for start in range(len(tokens) - size + 1):
            self._remember(window, tokens[start : start + size])


def build(context: DrafterContext, argument: str | None, options: LookaheadOptions) -> LookaheadDrafter:
    """See `DrafterEntry.build`."""
    return LookaheadDrafter(options)
