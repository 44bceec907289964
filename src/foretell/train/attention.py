"""Attention while a head is trained: the first depth sees the true rows, later ones their own draft too.

This is what a draft sees when the engine runs the head: the cache holds true features up to the token that
it hangs on, and behind them the rows of the draft itself (training-time test, EAGLE-3). Keys of the first
depth are computed once and serve every depth.

Shape suffixes: T rows of the batch, R rows of a depth, N rows of one sample, P its keys, H query heads,
K key/value heads, G query heads per key/value head, D head size, S depths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.train.batch import Batch, Rows


class DraftAttention:
    """Attention of one head over one batch, depth by depth."""

    def __init__(self, batch: Batch, scale: float, window: int | None) -> None:
        self._batch, self._scale, self._window = batch, scale, window
        self._keys: list[tuple[Tensor, Tensor]] = []  # per sample, of the first depth [K, P, D]
        self._drafted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch.sizes]  # [N, K, D]

    def first(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """All rows of the batch, each over its sample's rows up to itself."""
        sizes, mixed = list(self._batch.sizes), []
        parts = zip(q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True)
        for q_NHD, k_NKD, v_NKD in parts:
            k_KPD, v_KPD = k_NKD.transpose(0, 1), v_NKD.transpose(0, 1)
            self._keys.append((k_KPD, v_KPD))
            mask = None if self._window is None else self._visible(torch.arange(len(q_NHD)), len(q_NHD), 0)
            mixed_HND = F.scaled_dot_product_attention(
                q_NHD.transpose(0, 1)[None],
                k_KPD[None],
                v_KPD[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=True,
            )[0]
            mixed.append(mixed_HND.transpose(0, 1).flatten(1))
        return torch.cat(mixed)

    def later(self, rows: Rows, depth: int, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        """Rows of a later depth: each sees the true rows up to its own, and its own draft."""
        counts, mixed = list(rows.counts), []
        parts = zip(q_RHD.split(counts), k_RKD.split(counts), v_RKD.split(counts), strict=True)
        for number, (q_NHD, k_NKD, v_NKD) in enumerate(parts):
            if not len(q_NHD):
                continue
            self._drafted[number].append((k_NKD, v_NKD))
            mixed.append(self._sample(number, depth, q_NHD))
        return torch.cat(mixed) if mixed else q_RHD.flatten(1)

    def _sample(self, number: int, depth: int, q_NHD: Tensor) -> Tensor:
        k_KPD, v_KPD = self._keys[number]
        count, kv_heads = len(q_NHD), len(k_KPD)
        first = self._batch.firsts[number]
        seen = first + count  # no row of this depth sees more of the true ones
        q_KGND = (q_NHD * self._scale).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        true_KGNP = (q_KGND.flatten(1, 2) @ k_KPD[:, :seen].transpose(1, 2)).unflatten(1, (-1, count))
        visible_NP = self._visible(torch.arange(first, seen), seen, depth).to(q_NHD.device)
        true_KGNP = true_KGNP.masked_fill(~visible_NP, -torch.inf)
        k_SNKD, v_SNKD = (
            torch.stack([pair[which][:count] for pair in self._drafted[number]]) for which in range(2)
        )
        own_KGNS = torch.einsum("kgnd,snkd->kgns", q_KGND, k_SNKD)
        weight_KGNX = torch.cat([true_KGNP, own_KGNS], -1).softmax(-1)
        true_KGNP, own_KGNS = weight_KGNX.split([seen, len(k_SNKD)], -1)
        mixed_KGND = (true_KGNP.flatten(1, 2) @ v_KPD[:, :seen]).unflatten(1, (-1, count))
        mixed_KGND = mixed_KGND + torch.einsum("kgns,snkd->kgnd", own_KGNS, v_SNKD)
        mixed_NF: Tensor = mixed_KGND.permute(2, 0, 1, 3).flatten(1)
        return mixed_NF

    def _visible(self, row_N: Tensor, keys: int, depth: int) -> Tensor:
        """Which true rows each row sees."""
        back_NP = row_N[:, None] - torch.arange(keys)
        visible_NP = back_NP >= 0
        if self._window is not None:
            visible_NP &= back_NP + depth < self._window
        return visible_NP
