"""Gives acceptance rules what they ask for: the target at each node, and keyed random decisions.

Shape suffixes: R rows (the root, then the nodes of a tree), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.noise import Stream, make_key, uniform
from foretell.sampling import Sampler, keyed_argmax
from foretell.types import DraftTree, Verdict
from foretell.verify import Rule


class Rows:
    """The target at the nodes of one tree: row 0 is the root, row i + 1 node i. A row is processed when
    a rule first asks for it, so nodes that nobody reaches cost nothing."""

    def __init__(
        self, sampler: Sampler, tree: DraftTree, logits_RV: Tensor, best_R: Sequence[int] | None
    ) -> None:
        self._sampler = sampler
        self._tree = tree
        self._logits_RV = logits_RV
        self._best_R = best_R

    def choose(self, node: int) -> int:
        """See `verify.Target`."""
        if self._best_R is not None:
            return self._best_R[node + 1]
        return self._sampler.choose(self._logits_RV[node + 1], self._ahead(node))

    def probs(self, node: int) -> Tensor:
        """See `verify.Target`."""
        return self._sampler.probs(self._logits_RV[node + 1], self._ahead(node))

    def _ahead(self, node: int) -> list[int]:
        return [self._tree.tokens[i] for i in self._tree.path(node)]


class KeyedDraws:
    """Keyed decisions: the same whatever else was drawn before, and none used twice. A step is known by the
    position of its root, a test by its node, a replacement by the position that it settles."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position

    def accept(self, probability: float, depth: int, node: int) -> bool:
        """See `verify.Draws`."""
        return uniform(make_key(self._seed, Stream.ACCEPT, self._position), node) < probability

    def sample(self, weights_V: Tensor, depth: int) -> int:
        """See `verify.Draws`."""
        return keyed_argmax(weights_V.log(), make_key(self._seed, Stream.RESIDUAL, self._position + depth))


def likeliest(logits_RV: Tensor) -> list[int]:
    """The likeliest token of every row; -1 where its logits are not finite."""
    if not len(logits_RV):
        return []
    best = logits_RV.max(dim=-1)
    ids: list[int] = torch.where(torch.isfinite(best.values), best.indices, -1).tolist()
    return ids


def verify(
    rule: Rule, sampler: Sampler, tree: DraftTree, logits_RV: Tensor, best_R: Sequence[int]
) -> Verdict | None:
    """What the rule makes of a tree, from the logits of its root and nodes and the likeliest token of
    each; None without rows.

    Raises:
        FloatingPointError: the target's logits are not finite.
    """
    if not len(logits_RV):
        return None
    if -1 in best_R:
        raise FloatingPointError(
            "the target's logits are not finite: damaged weights, or an overflow in half precision"
        )
    rows = Rows(sampler, tree, logits_RV, best_R if sampler.untouched else None)
    return rule.verify(tree, rows, KeyedDraws(sampler.seed, sampler.length))
