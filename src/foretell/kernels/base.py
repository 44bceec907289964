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

    Where `order_at[t]` is not -1 the row reads a selection: j in [lo_T[t], hi_T[t]) stands for the slot
    `base_T[t] + order[order_at[t] + j]`. All rows of a request share its list.
    """

    slot_T: Tensor
    base_T: Tensor
    lo_T: Tensor
    hi_T: Tensor
    extra_start: Tensor
    extra: Tensor
    order_at: Tensor
    order: Tensor
    segments: tuple[tuple[int, int], ...]
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returned for this key the first time: all layers of a pass share it."""
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which compiled code has them (native/pass.h)."""
        ranges = self.slot_T, self.base_T, self.lo_T, self.hi_T
        return (*ranges, self.extra_start, self.extra, self.order_at, self.order)

    @cached_property
    def keys_read(self) -> int:
        """Keys read by one head over all rows."""
        return int((self.hi_T - self.lo_T).sum()) + len(self.extra)

    @cached_property
    def masks(self) -> list[tuple[slice | Tensor, Tensor]]:
        """Per segment: arena slots of N keys, and a bool mask [rows, N] of what is seen."""
        return [self._mask(row, rows) for row, rows in self.segments]

    def _mask(self, row: int, rows: int) -> tuple[slice | Tensor, Tensor]:
        part = slice(row, row + rows)
        extra = self.extra[int(self.extra_start[row]) : int(self.extra_start[row + rows])]
        base, at = int(self.base_T[row]), int(self.order_at[row])
        first, last = int(self.lo_T[part].min()), int(self.hi_T[part].max())
        keys_N, slots, place = torch.arange(first, last), None, extra - first
        if at >= 0:  # the range is one of places in the list; further slots get places behind it
            further, rank = extra.unique(return_inverse=True)
            slots = base + torch.cat([self.order[at + first : at + last], further])
            keys_N = torch.arange(first, last + len(further))
            place = last - first + rank
        elif len(extra):
            first, last = min(first, int(extra.min())), max(last, int(extra.max()) + 1)
            keys_N, place = torch.arange(first, last), extra - first
        lo_T, hi_T = self.lo_T[part, None], self.hi_T[part, None]
        mask_TN = (keys_N >= lo_T) & (keys_N < hi_T)
        counts = self.extra_start[row + 1 : row + rows + 1] - self.extra_start[row : row + rows]
        mask_TN[torch.arange(rows).repeat_interleave(counts), place] = True
        return slice(base + first, base + last) if slots is None else slots, mask_TN


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

    def partial(
        self, q_THD: Tensor, cache_KSD: tuple[Tensor, Tensor], seen: Visibility, spec: HeadSpec
    ) -> tuple[Tensor, Tensor]:
        """Attends over a part of the keys, storing nothing.

        Returns:
            fp32 [T, H, D] and [T, H]: what `attend` would give over these keys alone, and the natural
            logarithm of the sum of exp(score), sinks included. A row that sees none of them: 0 and -inf.
        """
        ...
