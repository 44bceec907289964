"""Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding").

A chain is judged as a whole: a prefix may be kept although one of its tokens alone would have been
rejected, because later tokens make up for it. Never accepts less than rejection sampling in
expectation. On a tree, the chain of first children is a block; where it ends early, the residual there
is the target of the next sibling, which starts a block of its own.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from foretell.types import DraftTree, Verdict
from foretell.verify.base import Draws, Target, draft_probs, without


def verify(tree: DraftTree, target: Target, draws: Draws) -> Verdict:
    """Accepts the longest prefix of each block that the rule keeps, block after block."""
    path: list[int] = []
    p_V, children = target.probs(-1), tree.children(-1)
    q_V = draft_probs(tree, -1) if children else None
    while children:
        nodes = _first_descendants(tree, children[0])
        kept, p_V, q_V = _judge(tree, nodes, p_V, q_V, target, draws, len(path))
        path += nodes[:kept]
        if kept == len(nodes):
            break
        # the block's token at the node where it ended is spent; its later siblings are still there
        siblings = children if kept == 0 else tree.children(nodes[kept - 1])
        children = siblings[1:]
    return Verdict(tuple(path), draws.sample(p_V, len(path)))


def _first_descendants(tree: DraftTree, node: int) -> list[int]:
    nodes = [node]
    while children := tree.children(nodes[-1]):
        nodes.append(children[0])
    return nodes


def _judge(
    tree: DraftTree,
    nodes: list[int],
    p_V: Tensor,
    q_V: Tensor | None,
    target: Target,
    draws: Draws,
    depth: int,
) -> tuple[int, Tensor, Tensor | None]:
    """Judges one block whose first token was drawn from q_V where the target wants p_V.

    Returns:
        How many tokens are kept, the distribution of the token after them, and what remains of q
        there.
    """
    weight = 1.0  # p_i of the paper: how likely the prefix is under the target, capped on the way
    token = tree.tokens[nodes[0]]
    kept, rest_V, left_V = 0, _excess(p_V, q_V, token, weight), without(q_V, token)
    for index, node in enumerate(nodes):
        token = tree.tokens[node]
        q = 1.0 if q_V is None else float(q_V[token])
        weight = min(1.0, weight * float(p_V[token]) / q) if q > 0 else 0.0
        p_V = target.probs(node)
        if index + 1 == len(nodes):
            if draws.accept(weight, depth + index, node):
                return len(nodes), p_V, None
            break
        following = tree.tokens[nodes[index + 1]]
        q_V = draft_probs(tree, node)
        excess_V = _excess(p_V, q_V, following, weight)
        total = float(excess_V.sum())
        chance = total / (total + 1 - weight) if weight < 1 else 1.0
        if draws.accept(chance, depth + index, node):
            kept, rest_V, left_V = index + 1, excess_V, without(q_V, following)
    return kept, rest_V / rest_V.sum(), left_V


def _excess(p_V: Tensor, q_V: Tensor | None, token: int, weight: float) -> Tensor:
    """(weight * p - q)+, with q one-hot at `token` for a deterministic draft; not normalised."""
    if q_V is None:
        excess_V = weight * p_V
        excess_V[token] = 0  # weight * p <= 1
        return excess_V
    return (weight * p_V - q_V).clamp_(min=0)
