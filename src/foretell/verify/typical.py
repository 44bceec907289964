"""Typical acceptance (Medusa, Cai et al. 2024, section 3.3.1): keep what the target finds plausible.

LOSSY: the output does not follow the target's distribution. A draft token is kept while its probability
exceeds min(epsilon, delta * exp(-entropy)); of all paths whose tokens are kept, the longest wins, then the
likelier. The next token is the target's likeliest, which is always taken. At temperature 0 that is greedy
decoding.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor

from foretell.types import DraftTree, Verdict
from foretell.verify.base import Draws, Target

EPSILON, DELTA = 0.09, 0.3  # of the paper's released code


def verify(tree: DraftTree, target: Target, draws: Draws) -> Verdict:
    """The longest plausible path; nothing is drawn."""
    best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
    probs = {-1: target.probs(-1)}
    waiting: list[tuple[int, float, tuple[int, ...]]] = [(-1, 0.0, ())]
    while waiting:
        node, score, path = waiting.pop()
        best = max(best, (len(path), score, path), key=lambda found: found[:2])
        floor = _floor(probs[node])
        for child in tree.children(node):
            p = float(probs[node][tree.tokens[child]])
            if p > floor:
                probs[child] = target.probs(child)
                waiting.append((child, score + math.log(p), (*path, child)))
    path = best[2]
    return Verdict(path, int(probs[path[-1] if path else -1].argmax()), lossless=False)


def _floor(p_V: Tensor) -> float:
    entropy = -float(p_V.xlogy(p_V).sum())
    return min(EPSILON, DELTA * math.exp(-entropy))
