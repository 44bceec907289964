"""What a head is trained to do, per position.

Shape suffixes: R rows, V draft vocabulary, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.registry import Registry

# (logits of the head [R, V], the target's distribution [R, V]) -> loss [R]
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits_RV: Tensor, chance_RV: Tensor) -> Tensor:
    """Against the target's distribution over the draft vocabulary (EAGLE-3)."""
    return F.cross_entropy(logits_RV, chance_RV, reduction="none")


def acceptance(logits_RV: Tensor, chance_RV: Tensor) -> Tensor:
    """Sum of min(p, q): the chance that rejection sampling keeps a token drawn from the head."""
    return torch.minimum(logits_RV.softmax(-1), chance_RV).sum(-1)


def lk(logits_RV: Tensor, chance_RV: Tensor) -> Tensor:
    """The hybrid LK loss (arXiv 2602.23881): cross-entropy while little is accepted, then 1 - acceptance;
    lambda = exp(-3 alpha), not differentiated."""
    alpha_R = acceptance(logits_RV, chance_RV)
    share_R = torch.exp(-3 * alpha_R.detach())
    return share_R * cross_entropy(logits_RV, chance_RV) + (1 - share_R) * (1 - alpha_R)


def regression(out_RW: Tensor, state_RW: Tensor) -> Tensor:
    """Smooth L1 between predicted and true states, mean over the width (EAGLE-1)."""
    return F.smooth_l1_loss(out_RW, state_RW, reduction="none").mean(-1)


LOSSES: Registry[TokenLoss] = Registry("loss", {"ce": cross_entropy, "lk": lk})
