"""The kernels in plain torch: for CUDA, and for CPUs without the compiled ones.

Equal to the compiled ones up to rounding, not bit by bit. Shape suffixes: see base.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.base import HeadSpec, Visibility

_ROWS_AT_ONCE = 256  # bounds the score matrix of a long prefill


class TorchKernels:
    """See `foretell.kernels.base.Kernels`."""

    name = "torch"
    row_exact = False

    def add_norm(self, residual_TW: Tensor, delta_TW: Tensor | None, weight_W: Tensor, eps: float) -> Tensor:
        if delta_TW is not None:
            residual_TW += delta_TW
        return F.rms_norm(residual_TW, (residual_TW.shape[-1],), weight_W, eps)

    def rope(
        self,
        qkv_TF: Tensor,
        table: tuple[Tensor, Tensor],
        position_T: Tensor,
        spec: HeadSpec,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        rotated = (spec.heads + spec.kv_heads) * spec.dim
        x_TAD = qkv_TF[:, :rotated].unflatten(1, (-1, spec.dim))
        if norms is not None:
            q, k = x_TAD[:, : spec.heads], x_TAD[:, spec.heads :]
            q.copy_(F.rms_norm(q, (spec.dim,), norms[0], eps))
            k.copy_(F.rms_norm(k, (spec.dim,), norms[1], eps))
        half = spec.dim // 2
        cos, sin = (part[position_T][:, None].to(qkv_TF.dtype) for part in table)
        lo, hi = x_TAD[..., :half], x_TAD[..., half:]
        lo_new, hi_new = lo * cos - hi * sin, hi * cos + lo * sin
        lo.copy_(lo_new)
        hi.copy_(hi_new)

    def silu_mul(self, gate_up_TW: Tensor) -> Tensor:
        gate, up = gate_up_TW.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache_KSD: tuple[Tensor, Tensor],
        seen: Visibility,
        spec: HeadSpec,
    ) -> Tensor:
        keys_KSD, values_KSD = cache_KSD
        device, group = keys_KSD.device, spec.heads // spec.kv_heads
        slot_T = seen.cached(("slots", device), lambda: seen.slot_T.to(device))
        keys_KSD[:, slot_T] = k_TKD.transpose(0, 1)
        values_KSD[:, slot_T] = v_TKD.transpose(0, 1)
        out_THD = torch.empty_like(q_THD)
        for (row, rows), (slots, mask_RN) in zip(seen.segments, _masks(seen, device, group), strict=True):
            k_KND, v_KND = keys_KSD[:, slots], values_KSD[:, slots]
            for start in range(0, rows, _ROWS_AT_ONCE):
                end = min(start + _ROWS_AT_ONCE, rows)
                part = slice(row + start, row + end)
                seen_RN = mask_RN[start * group : end * group]
                out_THD[part] = _attend_one(q_THD[part], k_KND, v_KND, seen_RN, spec)
        return out_THD.flatten(1)

    def partial(
        self, q_THD: Tensor, cache_KSD: tuple[Tensor, Tensor], seen: Visibility, spec: HeadSpec
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.partial`."""
        keys_KSD, values_KSD = cache_KSD
        device, group = keys_KSD.device, spec.heads // spec.kv_heads
        out_THD = torch.empty(q_THD.shape, dtype=torch.float32, device=device)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=device)
        for (row, rows), (slots, mask_RN) in zip(seen.segments, _masks(seen, device, group), strict=True):
            k_KND, v_KND = keys_KSD[:, slots], values_KSD[:, slots]
            for start in range(0, rows, _ROWS_AT_ONCE):
                end = min(start + _ROWS_AT_ONCE, rows)
                part = slice(row + start, row + end)
                seen_RN = mask_RN[start * group : end * group]
                out_THD[part], lse_TH[part] = _partial_one(q_THD[part], k_KND, v_KND, seen_RN, spec)
        return out_THD, lse_TH


def _masks(seen: Visibility, device: torch.device, group: int) -> list[tuple[slice | Tensor, Tensor]]:
    """Per segment its slots and its mask, a row per query head of a group; all layers share them."""
    return seen.cached(
        ("masks", device, group),
        lambda: [
            (_to(slots, device), mask_TN.to(device).repeat_interleave(group, dim=0))
            for slots, mask_TN in seen.masks
        ],
    )


def _to(slots: slice | Tensor, device: torch.device) -> slice | Tensor:
    return slots if isinstance(slots, slice) else slots.to(device)


def _attend_one(q_THD: Tensor, k_KND: Tensor, v_KND: Tensor, mask_RN: Tensor, spec: HeadSpec) -> Tensor:
    """Attention of one request, its query groups folded into rows so that K and V are read once."""
    rows, group = q_THD.shape[0], spec.heads // spec.kv_heads
    q_KRD = q_THD.unflatten(1, (spec.kv_heads, group)).permute(1, 0, 2, 3).flatten(1, 2)
    if spec.softcap or spec.sinks_H is not None:
        out_KRD = _attend_by_hand(q_KRD, k_KND, v_KND, mask_RN, spec)
    else:
        out_KRD = F.scaled_dot_product_attention(
            q_KRD[None], k_KND[None], v_KND[None], attn_mask=mask_RN, scale=spec.scale
        )[0]
    out_THD: Tensor = out_KRD.unflatten(1, (rows, group)).permute(1, 0, 2, 3).flatten(1, 2)
    return out_THD


def _attend_by_hand(q_KRD: Tensor, k_KND: Tensor, v_KND: Tensor, mask_RN: Tensor, spec: HeadSpec) -> Tensor:
    weights_KRN = _scores(q_KRD, k_KND, mask_RN, spec).softmax(-1)[..., : k_KND.shape[1]]
    return torch.matmul(weights_KRN.to(v_KND.dtype), v_KND)


def _partial_one(
    q_THD: Tensor, k_KND: Tensor, v_KND: Tensor, mask_RN: Tensor, spec: HeadSpec
) -> tuple[Tensor, Tensor]:
    """One request's attention in fp32, and the logarithm of each row's sum; rows without keys: 0, -inf."""
    rows, group = q_THD.shape[0], spec.heads // spec.kv_heads
    q_KRD = q_THD.unflatten(1, (spec.kv_heads, group)).permute(1, 0, 2, 3).flatten(1, 2)
    scores_KRN = _scores(q_KRD, k_KND, mask_RN, spec)
    if not scores_KRN.shape[-1]:
        scores_KRN = torch.nn.functional.pad(scores_KRN, (0, 1), value=-torch.inf)
    lse_KR = scores_KRN.logsumexp(-1)
    weights_KRN = (scores_KRN - lse_KR.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp()
    out_KRD = weights_KRN[..., : k_KND.shape[1]] @ v_KND.float()
    out_THD = out_KRD.unflatten(1, (rows, group)).permute(1, 0, 2, 3).flatten(1, 2)
    lse_TH = lse_KR.unflatten(1, (rows, group)).permute(1, 0, 2).flatten(1, 2)
    return out_THD, lse_TH


def _scores(q_KRD: Tensor, k_KND: Tensor, mask_RN: Tensor, spec: HeadSpec) -> Tensor:
    """fp32 scores [K, R, N], -inf where hidden; with sinks one column more."""
    scores_KRN = (q_KRD @ k_KND.transpose(1, 2)).float() * spec.scale
    if spec.softcap:
        scores_KRN = spec.softcap * torch.tanh(scores_KRN / spec.softcap)
    scores_KRN = scores_KRN.masked_fill(~mask_RN, -torch.inf)
    if spec.sinks_H is None:
        return scores_KRN
    rows = q_KRD.shape[1] // (spec.heads // spec.kv_heads)
    sinks_KR1 = spec.sinks_H.float().view(spec.kv_heads, 1, -1).expand(-1, rows, -1).flatten(1)[..., None]
    return torch.cat([scores_KRN, sinks_KR1], -1)
