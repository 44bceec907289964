"""Building draft trees."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.types import DraftTree


def merge_chains(chains: Sequence[Sequence[int]], budget: int) -> DraftTree:
    """The tree that holds these deterministic chains, shared beginnings once.

    Chains come in order of preference: nodes are added chain by chain until `budget` is reached, so an
    earlier chain is complete before a later one begins.
    """
    tokens: list[int] = []
    parents: list[int] = []
    child: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = -1
        for token in chain:
            known = child.get((node, token))
            if known is None:
                if len(tokens) >= budget:
                    break
                known = len(tokens)
                child[node, token] = known
                tokens.append(token)
                parents.append(node)
            node = known
    return DraftTree(tuple(tokens), tuple(parents))
