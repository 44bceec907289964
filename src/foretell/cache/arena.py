"""The slots that hold keys and values.

Shape suffixes: L layers, K key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.errors import InputError


class KVArena:
    """K and V of all requests: one slot per token, the same slot in every layer and head.

    Args:
        layers, kv_heads, dim: the model's attention shape.
        slots: tokens that fit.

    Raises:
        InputError: there is not so much memory.
    """

    def __init__(
        self, layers: int, kv_heads: int, dim: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, kv_heads, slots, dim)
        # zeros, not empty: a masked slot is multiplied by weight 0 and must be finite
        try:
            self.keys_LKSD = torch.zeros(shape, dtype=dtype, device=device)
            self.values_LKSD = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = 2 * layers * kv_heads * slots * dim * dtype.itemsize / 1e9
            raise InputError(
                f"a KV cache of {slots} tokens takes {size:.1f} GB, which cannot be had"
            ) from error

    @property
    def slots(self) -> int:
        return self.keys_LKSD.shape[2]

    @property
    def grain(self) -> int:
        """Ranges begin at multiples of this slot number."""
        return 1

    @property
    def device(self) -> torch.device:
        return self.keys_LKSD.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, [K, S, D] each."""
        return self.keys_LKSD[index], self.values_LKSD[index]

    def keys(self, layer: int, start: int, length: int) -> Tensor:
        """K of a range of slots, [K, length, D]."""
        return self.keys_LKSD[layer, :, start : start + length]

    def move(self, source: Sequence[int], target: int) -> None:
        """Copies slots `source` to `target, target + 1, ...`; the two may overlap."""
        if not source or (source[0] == target and source[-1] - target == len(source) - 1):
            return
        index = torch.tensor(source, dtype=torch.int64, device=self.device)
        for store_LKSD in (self.keys_LKSD, self.values_LKSD):
            store_LKSD[:, :, target : target + len(source)] = store_LKSD[:, :, index]
