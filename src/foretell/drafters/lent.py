"""The target's output head, lent to draft heads: whole, or the rows of a draft vocabulary; and what logits
over a draft vocabulary say of the target's tokens.

Shape suffixes: R rows, W hidden width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.heads.vocabulary import head_rows
from foretell.models.base import TargetModel
from foretell.models.linear import PackedLinear, pack
from foretell.sampling import Sampler


class LentHead:
    """Logits over the draft vocabulary, and its ranking as target ids.

    Args:
        target: whose head it is.
        target_ids: ids of the draft vocabulary; None = all.
        weights: how the rows of a draft vocabulary are kept; see `foretell.models.linear.pack`.
    """

    def __init__(self, target: TargetModel, target_ids: Tensor | None, weights: str) -> None:
        self._target = target
        self._ids = None if target_ids is None else target_ids.to(target.device)
        self._weights = weights
        self._packed: PackedLinear | None = None

    def __call__(self, state_RW: Tensor) -> Tensor:
        """Logits [R, V] of last hidden states."""
        if self._ids is None:
            return self._target.head(state_RW)
        if self._packed is None:  # heads with an output layer of their own never need it
            self._packed = pack(head_rows(self._target, self._ids), None, self._target.dtype, self._weights)
        logits_RV: Tensor = self._packed(state_RW.to(self._target.dtype)).float()
        return logits_RV

    def rank(
        self, sampler: Sampler, logits_V: Tensor, ahead: Sequence[int], count: int
    ) -> list[tuple[int, float]]:
        """See `Sampler.rank`; the target's other tokens are never drafted."""
        if sampler.adjusts(len(ahead)):  # by target ids
            return sampler.rank(self._spread(logits_V), ahead, count)
        return sampler.rank(logits_V, ahead, count, self._ids)

    def _spread(self, logits_V: Tensor) -> Tensor:
        """Over the target's ids. Without a map the draft vocabulary is the beginning of them."""
        size = self._target.vocab_size
        if self._ids is None and len(logits_V) == size:
            return logits_V
        spread = logits_V.new_full((size,), -torch.inf)
        spread[slice(len(logits_V)) if self._ids is None else self._ids] = logits_V
        return spread
