"""Attention while a head is trained: the first depth sees the true rows, later ones their own draft too.

This is what a draft sees when the engine runs the head: the cache holds true features up to the token that
it hangs on, and behind them the rows of the draft itself (training-time test, EAGLE-3). Keys of the first
depth are computed once and serve every depth.

Shape suffixes: R rows of a depth, X rows that give keys, N rows of one sample, Y those that give keys, P its
true keys, H query heads, K key/value heads, G query heads per key/value head, D head size, S depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.train.batch import Batch, Rows


class DraftAttention:
    """Attention of one head over one batch, depth by depth."""

    def __init__(self, batch: Batch, scale: float, window: int | None) -> None:
        self._batch, self._scale, self._window = batch, scale, window
        self._true: list[tuple[Tensor, Tensor]] = []  # per sample, of the first depth [K, P, D]
        self._drafted: list[Drafted] = []  # per sample

    def __call__(self, rows: Rows, depth: int, q_RHD: Tensor, k_XKD: Tensor, v_XKD: Tensor) -> Tensor:
        """One depth: keys of all rows of the batch at depth 0, of its own rows later.

        Each row sees the true rows of its sample up to its own, and its own draft.
        """
        counts, mixed = list(rows.counts), []
        split = counts if depth else list(self._batch.sizes)
        parts = zip(
            self._local(rows), q_RHD.split(counts), k_XKD.split(split), v_XKD.split(split), strict=True
        )
        for number, (row_N, q_NHD, k_YKD, v_YKD) in enumerate(parts):
            if depth:
                self._drafted[number] = self._drafted[number].at(row_N).and_then(k_YKD, v_YKD)
            else:
                self._true.append((k_YKD.transpose(0, 1), v_YKD.transpose(0, 1)))
                self._drafted.append(Drafted(row_N))
            if len(row_N):
                mixed.append(self._sample(number, depth, q_NHD))
        return torch.cat(mixed) if mixed else q_RHD.flatten(1)

    def _local(self, rows: Rows) -> list[Tensor]:
        """Places in its sample, per sample."""
        return list(self._batch.position_T[rows.at_R].split(list(rows.counts)))

    def _sample(self, number: int, depth: int, q_NHD: Tensor) -> Tensor:
        k_KPD, v_KPD = self._true[number]
        drafted, (kv_heads, _, _) = self._drafted[number], k_KPD.shape
        seen = int(drafted.row_N[-1]) + 1  # no row of this depth sees more of the true ones
        q_KGND = (q_NHD * self._scale).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        weight_KGNX = (q_KGND.flatten(1, 2) @ k_KPD[:, :seen].transpose(1, 2)).unflatten(1, (-1, len(q_NHD)))
        weight_KGNX = weight_KGNX.masked_fill(~self._visible(drafted.row_N, seen, depth), -torch.inf)
        if depth:
            own_KGNS = torch.einsum("kgnd,snkd->kgns", q_KGND, torch.stack(drafted.keys))
            weight_KGNX = torch.cat([weight_KGNX, own_KGNS], -1)
        true_KGNP, own_KGNS = weight_KGNX.softmax(-1).split([seen, depth], -1)
        mixed_KGND = (true_KGNP.flatten(1, 2) @ v_KPD[:, :seen]).unflatten(1, (-1, len(q_NHD)))
        if depth:
            mixed_KGND = mixed_KGND + torch.einsum("kgns,snkd->kgnd", own_KGNS, torch.stack(drafted.values))
        mixed_NF: Tensor = mixed_KGND.permute(2, 0, 1, 3).flatten(1)
        return mixed_NF

    def _visible(self, row_N: Tensor, keys: int, depth: int) -> Tensor:
        """Which true rows each row sees."""
        back_NP = row_N[:, None] - torch.arange(keys, device=row_N.device)
        visible_NP = back_NP >= 0
        if self._window is not None:
            visible_NP &= back_NP + depth < self._window
        return visible_NP


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the rows of one sample have drafted so far.

    Args:
        row_N: their places in the sample, rising.
        keys, values: per later depth, [N, K, D].
    """

    row_N: Tensor
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def at(self, row_N: Tensor) -> Drafted:
        """Of some of the rows."""
        keep_N = torch.searchsorted(self.row_N, row_N)
        return Drafted(row_N, *(tuple(part[keep_N] for part in both) for both in (self.keys, self.values)))

    def and_then(self, k_NKD: Tensor, v_NKD: Tensor) -> Drafted:
        """With one more depth."""
        return Drafted(self.row_N, (*self.keys, k_NKD), (*self.values, v_NKD))
