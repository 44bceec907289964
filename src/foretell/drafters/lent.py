"""The target's output head, lent to draft heads: whole, or the rows of a draft vocabulary.

Shape suffixes: R rows, W hidden width, V draft vocabulary; logits that are
returned are over the target's ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.heads.vocabulary import head_rows
from foretell.models.base import TargetModel
from foretell.models.linear import PackedLinear, pack


class LentHead:
    """Logits over the target's ids; -inf for those that cannot be drafted.

    Args:
        target: whose head it is.
        target_ids: ids of the draft vocabulary; None = all.
    """

    def __init__(self, target: TargetModel, target_ids: Tensor | None) -> None:
        self._target = target
        self._ids = None if target_ids is None else target_ids.to(target.device)
        self._packed: PackedLinear | None = None

    def __call__(self, state_RW: Tensor) -> Tensor:
        """Of last hidden states."""
        if self._ids is None:
            return self._target.head(state_RW)
        if self._packed is None:  # heads with an output layer of their own never need it
            self._packed = pack(head_rows(self._target, self._ids), None, self._target.dtype)
        return self.spread(self._packed(state_RW.to(self._target.dtype)).float())

    def spread(self, logits_RV: Tensor) -> Tensor:
        """Logits over the draft vocabulary, which without a map is the beginning of the target's."""
        size = self._target.vocab_size
        if self._ids is None and logits_RV.shape[1] == size:
            return logits_RV
        spread = logits_RV.new_full((len(logits_RV), size), -torch.inf)
        if self._ids is None:
            spread[:, : logits_RV.shape[1]] = logits_RV
        else:
            spread[:, self._ids] = logits_RV
        return spread
