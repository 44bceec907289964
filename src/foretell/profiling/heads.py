"""Semantic retrieval heads (CompressKV, Lin et al. 2025): whose attention goes to where the answer is.

At every decoded token that occurs in the needle, a head scores the whole attention mass that the pass which
chose the token pays to the needle's span; a sample's score is the mean over those tokens, so that a repeated
word counts as often as it is said. Heads of a layer are ranked by the mean over samples.

Shape suffixes: L layers, H query heads, R queries, J chosen heads, N keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.profiling.passes import Passed
from foretell.sparse import Heads, attention_mass

_COUNTED = 30


def needle_scores(passed: Passed, span: range) -> Tensor | None:
    """Scores [L, H] of one sample; None where no decoded token occurs in the needle."""
    needle = set(passed.tokens[span.start : span.stop])
    answer = passed.tokens[passed.prompt :]
    rows = [passed.prompt - 1 + i for i, token in enumerate(answer) if token in needle]
    if not rows:
        return None
    first, layers = passed.prompt - 1, []
    for layer in sorted(passed.queries):
        queries = passed.queries[layer].at([row - first for row in rows])
        keys_KND = passed.arena.layer(layer)[0][:, : passed.lease.length]
        mass_RHN = attention_mass(queries.q_THD, keys_KND, queries.spec, range(queries.spec.heads), rows)
        layers.append(mass_RHN[..., span.start : span.stop].sum(-1).mean(0))
    return torch.stack(layers)


def top_heads(scores_LH: Tensor, count: int) -> tuple[Heads, ...]:
    """The best `count` heads of every layer, in order of their numbers."""
    best_LJ = scores_LH.topk(min(count, scores_LH.shape[1]), dim=1).indices.sort(1).values
    return tuple(Heads(layer, tuple(row)) for layer, row in enumerate(best_LJ.tolist()))


def weights(scores_LH: Tensor) -> Tensor:
    """What each head counts in the attention to recover [L, H], in all 1: its score, if it is among the best
    30 of the model, without which needles are no longer found."""
    flat = scores_LH.flatten()
    best = flat.topk(min(_COUNTED, len(flat))).indices
    kept = torch.zeros_like(flat)
    kept[best] = flat[best]
    return (kept / kept.sum()).view_as(scores_LH)


def mean_scores(samples: Sequence[Tensor]) -> Tensor:
    """The mean [L, H] over samples."""
    return torch.stack(list(samples)).mean(0)
