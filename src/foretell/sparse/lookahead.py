"""Where a draft looks: the attention of the queries that its tokens came from (Dustin's look-ahead).

Shape suffixes: R queries, H query heads, J chosen query heads, K key/value heads, N positions, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.attention import Queries
from foretell.cache import KVArena
from foretell.kernels import HeadSpec
from foretell.sparse.signals import add_attention
from foretell.types import Needs


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads of a layer whose attention is asked for, ascending; None = all of them."""

    layer: int
    heads: tuple[int, ...] | None = None

    def of(self, spec: HeadSpec) -> Sequence[int]:
        """Their numbers."""
        return range(spec.heads) if self.heads is None else self.heads


def spread_layers(layers: int) -> tuple[Heads, ...]:
    """What is asked of a draft where no profile says: all heads of the layers at a quarter, a half and three
    quarters of its depth."""
    return tuple(Heads(layer) for layer in sorted({layers // 4, layers // 2, 3 * layers // 4}))


def watching(watched: Sequence[Heads]) -> Needs:
    """What a pass must hand out."""
    return Needs(queries=tuple(chosen.layer for chosen in watched))


def draft_mass(
    looks: Sequence[Mapping[int, Queries]], watched: Sequence[Heads], arena: KVArena, start: int, length: int
) -> Tensor | None:
    """Attention [N = length] that queries pay to a history, averaged over them and heads, then layers.

    Args:
        looks: per pass, the queries of every watched layer; none = None.
        arena, start, length: where the history's keys lie; nothing else takes part in the softmax.
    """
    if not looks:
        return None
    total_N = torch.zeros(length, device=arena.layer(watched[0].layer)[0].device)
    for chosen in watched:
        layer = chosen.layer
        q_RHD, spec = torch.cat([look[layer].q_THD for look in looks]), looks[0][layer].spec
        keys_KND = arena.layer(layer)[0][:, start : start + length]
        add_attention(total_N, q_RHD, keys_KND, spec, chosen.of(spec), [length - 1] * len(q_RHD))
    return total_N / (len(q_RHD) * len(watched))
