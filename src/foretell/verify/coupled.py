"""Coupled verification: keep the draft while it says what the target says.

The target's token at absolute position t is argmax(log p_t + g_t) with Gumbel noise g_t that only the
request's seed, t and the token id decide. That token is what plain decoding emits at t, so the draft
can change when it is computed but never what it is: same seed, same text, with speculation on or off
(drafter-invariant speculative decoding; Daliri, Musco, Suresh 2024). Greedy is the case without noise.
"""

from __future__ import annotations

from foretell.types import DraftTree, Verdict
from foretell.verify.base import Draws, Target


def verify(tree: DraftTree, target: Target, draws: Draws) -> Verdict:
    """Follows the target's own tokens down the tree; the first one outside it is the next token."""
    node = -1
    path: list[int] = []
    while True:
        token = target.choose(node)
        match = next((child for child in tree.children(node) if tree.tokens[child] == token), None)
        if match is None:
            return Verdict(tuple(path), token)
        path.append(match)
        node = match
