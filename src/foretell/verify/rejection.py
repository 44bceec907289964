"""Speculative rejection sampling on trees.

Chains: Leviathan et al. 2023, Chen et al. 2023. Siblings drawn without replacement are tried one after
the other, each against the residual left by those before it and against q without them, renormalised
(SpecInfer, Miao et al. 2023; RSD, Jeon et al. 2024). A deterministic draft is a q that is one-hot at
each token, which is exact for any tree.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from foretell.types import DraftTree, Verdict
from foretell.verify.base import Draws, Target, draft_probs, residual, without


def verify(tree: DraftTree, target: Target, draws: Draws) -> Verdict:
    """Accepts a child with min(1, p / q); after the last rejection samples the residual."""
    node = -1
    path: list[int] = []
    while True:
        p_V, q_V = target.probs(node), None
        children = tree.children(node)
        if children:
            q_V = draft_probs(tree, node)
        for child in children:
            token = tree.tokens[child]
            p, q = float(p_V[token]), 1.0 if q_V is None else float(q_V[token])
            if draws.accept(min(1.0, p / q) if q > 0 else 0.0, len(path), child):
                break
            p_V, q_V = residual(p_V, q_V, token), without(q_V, token)
        else:
            return Verdict(tuple(path), draws.sample(p_V, len(path)))
        path.append(child)
        node = child
