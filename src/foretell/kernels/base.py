"""What the decode path needs beside matrix products, as one interface with two implementations.

Shape suffixes: T packed rows of all requests, N keys, H query heads, K key/value heads, G = H / K,
D head size, S arena slots, W hidden width, F = (H + 2K) * D fused projection, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

PANEL = 16  # outputs side by side in a packed weight: native/linear.c
BLOCK8 = 64  # inputs that share a scale in 8 bits: native/linear8.c
T = TypeVar("T")

MAX_CHUNK = 16  # row-heads of one task, at most: native/attend.c


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Shape and scoring rule of one attention layer.

    Args:
        heads, kv_heads, dim: query heads, key/value heads, size of a head.
        scale: factor of the raw scores.
        window: a row sees only keys at most `window - 1` positions back; None = all.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        sinks_H: one extra logit per head that takes weight and adds no value (GPT-OSS); None = off.
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks_H: Tensor | None = None


@dataclass(frozen=True)
class Visibility:
    """Which arena slots each packed row writes and reads.

    Row t stores its K and V at `slot_T[t]` and sees slots `base_T[t] + [lo_T[t], hi_T[t])`, then the
    slots `base_T[t] + extra[extra_start[t] : extra_start[t + 1]]`; in that order they are in order of
    position. `segments` lists (first row, rows) of each request. All tensors are int64 on the CPU.
    """

    slot_T: Tensor
    base_T: Tensor
    lo_T: Tensor
    hi_T: Tensor
    extra_start: Tensor
    extra: Tensor
    segments: tuple[tuple[int, int], ...]
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returned for this key the first time: all layers of a pass share it."""
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    @cached_property
    def keys_read(self) -> int:
        """Keys read by one head over all rows."""
        return int((self.hi_T - self.lo_T).sum()) + len(self.extra)

    @cached_property
    def masks(self) -> list[tuple[int, int, Tensor]]:
        """Per segment: first slot (absolute), keys N, and a bool mask [rows, N] of what is seen."""
        out = []
        for row, rows in self.segments:
            part = slice(row, row + rows)
            start, end = int(self.extra_start[row]), int(self.extra_start[row + rows])
            extra = self.extra[start:end]
            first = int(self.lo_T[part].min())
            last = int(self.hi_T[part].max())
            if len(extra):
                first, last = min(first, int(extra.min())), max(last, int(extra.max()) + 1)
            keys_N = torch.arange(first, last)
            lo_T, hi_T = self.lo_T[part, None], self.hi_T[part, None]
            mask_TN = (keys_N >= lo_T) & (keys_N < hi_T)
            counts = self.extra_start[row + 1 : row + rows + 1] - self.extra_start[row : row + rows]
            mask_TN[torch.arange(rows).repeat_interleave(counts), extra - first] = True
            out.append((int(self.base_T[row]) + first, last - first, mask_TN))
        return out


class Kernels(Protocol):
    """Row-wise kernels. `row_exact`: the bits of a row do not depend on the rows beside it."""

    name: str
    row_exact: bool

    def add_norm(self, residual_TW: Tensor, delta_TW: Tensor | None, weight_W: Tensor, eps: float) -> Tensor:
        """residual += delta in place; returns RMSNorm(residual) * weight, [T, W]."""
        ...

    def rope(
        self,
        qkv_TF: Tensor,
        table: tuple[Tensor, Tensor],
        position_T: Tensor,
        spec: HeadSpec,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        """Rotates the q and k heads of `qkv_TF` in place, normalising each head first if `norms`."""
        ...

    def silu_mul(self, gate_up_TW: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache_KSD: tuple[Tensor, Tensor],
        seen: Visibility,
        spec: HeadSpec,
    ) -> Tensor:
        """Stores K and V at each row's slot, then attends: [T, H * D]."""
        ...
