"""Tables of rotary angles.

Shape suffixes: P positions, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretell.models.config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """[D / 2] float32, as transformers' `ROPE_INIT_FUNCTIONS` for default, linear, llama3 and yarn."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        # wavelengths beyond the original context are stretched, short ones kept, the rest blended
        wavelength = 2 * math.pi / frequency
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequency / rope.factor + smooth * frequency
    if rope.kind == "yarn":
        kept = _yarn_kept(rope, dim)
        return frequency / rope.factor * (1 - kept) + frequency * kept
    return frequency


def _yarn_kept(rope: Rope, dim: int) -> Tensor:
    """How much of each frequency stays unstretched: 1 for fast ones, 0 for slow ones, a ramp between."""

    def index_of(turns: float) -> float:
        """The (fractional) frequency that makes so many turns within the original context."""
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high > low else 0.001
    return 1 - ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)


class RopeTable:
    """cos and sin, [P, D / 2] float32 each, grown on demand."""

    def __init__(self, rope: Rope, dim: int, device: torch.device) -> None:
        self._frequency = inverse_frequencies(rope, dim).to(device)
        self._magnitude = rope.magnitude
        self._cos_PD = torch.empty(0, dim // 2, device=device)
        self._sin_PD = self._cos_PD

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables that hold at least the positions 0 .. positions - 1."""
        if positions > len(self._cos_PD):
            size = max(512, 1 << (positions - 1).bit_length())
            angle_PD = torch.arange(size, device=self._frequency.device).float()[:, None] * self._frequency
            self._cos_PD = angle_PD.cos() * self._magnitude
            self._sin_PD = angle_PD.sin() * self._magnitude
        return self._cos_PD, self._sin_PD
