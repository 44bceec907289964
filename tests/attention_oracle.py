"""A slow, obvious oracle of `attend`, in float64, for tests.

Shape suffixes: T packed rows, N keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.attention.batch import Segment
from foretell.kernels import HeadSpec


def attend_reference(
    q_THD: Tensor,
    past_KND: tuple[Tensor, Tensor],
    new_TKD: tuple[Tensor, Tensor],
    segment: Segment,
    spec: HeadSpec,
) -> Tensor:
    """Attention of one segment's rows, one row and head at a time: [T, H, D] float64.

    Args:
        past_KND: committed keys and values, `segment.past` of them.
        new_TKD: keys and values of the segment's rows.
    """
    chain = len(segment.pending)
    rows_seen = [list(range(i + 1)) for i in range(chain)]
    rows_seen += [list(range(chain)) + path for path in segment.paths()]
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float64)
    for row, visible in enumerate(rows_seen):
        oldest = 0 if spec.window is None else segment.past + len(visible) - spec.window
        for head in range(spec.heads):
            kv = head // (spec.heads // spec.kv_heads)
            old, new = (past_KND[i][kv] for i in (0, 1)), (new_TKD[i][visible, kv] for i in (0, 1))
            read = range(segment.past) if segment.selected is None else segment.selected.tolist()
            places = [*read, *range(segment.past, segment.past + len(visible))]
            places = [place for place in places if place >= oldest]
            k_ND, v_ND = (torch.cat([a, b])[places].double() for a, b in zip(old, new, strict=True))
            score_N = k_ND @ q_THD[row, head].double() * spec.scale
            if spec.softcap:
                score_N = spec.softcap * torch.tanh(score_N / spec.softcap)
            weight_N = score_N.exp()
            total = weight_N.sum() + (0 if spec.sinks_H is None else spec.sinks_H[head].double().exp())
            out_THD[row, head] = weight_N @ v_ND / total
    return out_THD
