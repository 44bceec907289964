"""Exact merge of attention over parts of the keys: (out, lse) of each part become those of all.

Natural logarithms, fp32. Parts are added in order of rank, row by row: the bits of a row depend neither on
the rows beside it nor on the order in which parts arrived.

Shape suffixes: T rows, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]


def nothing(q_THD: Tensor) -> Partial:
    """The partial of rows that see no key: output 0, logarithm of an empty sum."""
    out_THD = torch.zeros(q_THD.shape, device=q_THD.device)
    return out_THD, torch.full(q_THD.shape[:2], -torch.inf, device=q_THD.device)


def merge(parts: Sequence[Partial]) -> Partial:
    """One partial of several, [T, H, D] and [T, H] each; where none sees a key, 0 and -inf."""
    if len(parts) == 1:
        return parts[0]
    top_TH = parts[0][1]
    for _, lse_TH in parts[1:]:
        top_TH = torch.maximum(top_TH, lse_TH)
    # an empty row has no largest logarithm; any finite number serves
    top_TH = torch.where(top_TH == -torch.inf, 0.0, top_TH)
    out_THD = torch.zeros_like(parts[0][0])
    sum_TH = torch.zeros_like(top_TH)
    for part_THD, lse_TH in parts:
        weight_TH = (lse_TH - top_TH).exp()
        out_THD += part_THD * weight_TH[..., None]
        sum_TH += weight_TH
    empty_TH = sum_TH == 0
    out_THD /= torch.where(empty_TH, 1.0, sum_TH)[..., None]
    return out_THD, torch.where(empty_TH, -torch.inf, top_TH + sum_TH.log())


def packed(part: Partial) -> Tensor:
    """A partial as one message, fp32 [T, H, D + 1]."""
    return torch.cat([part[0], part[1][..., None]], -1)


def unpacked(message_THE: Tensor) -> Partial:
    """The partial of a message."""
    return message_THE[..., :-1].contiguous(), message_THE[..., -1].contiguous()
