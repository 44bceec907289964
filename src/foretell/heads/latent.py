"""Multi-head latent attention of DeepSeek-V2/V3 (2412.19437, section 2.1.1), decompressed.

Keys and values come from one narrow latent; a part of each key that all heads share carries the rotary
embedding. Here both are expanded and cached per head, values padded to the keys' size: for the one layer
of a draft head that is simple and fast enough.

Shape suffixes: T rows, R rows whose output is wanted, W hidden width, H heads, D key size, N its unrotated
part, P its rotated part, V value size, L latent width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.heads.layers import Angles, Attend, Projection, RmsNorm, Slot, picked, positive, rotate
from foretell.models.config import yarn_scale


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Shape of latent attention; `query_rank` 0 = queries come straight from the input."""

    hidden: int
    heads: int
    unrotated: int
    rotated: int
    value: int
    query_rank: int
    rank: int
    eps: float
    bias: bool
    interleaved: bool

    def __post_init__(self) -> None:
        positive(self, "hidden", "heads", "unrotated", "rotated", "value", "rank")
        if self.rotated % 2 or self.value > self.dim:
            raise ValueError(f"head sizes {self.unrotated} + {self.rotated} and {self.value} do not fit")

    @property
    def dim(self) -> int:
        """Size of a key."""
        return self.unrotated + self.rotated


def latent_config(config: Mapping[str, Any]) -> LatentConfig:
    """From DeepSeek's configuration; raises KeyError where a width is missing."""
    return LatentConfig(
        hidden=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        unrotated=int(config["qk_nope_head_dim"]),
        rotated=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        rank=int(config["kv_lora_rank"]),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        bias=bool(config.get("attention_bias", False)),
        interleaved=bool(config.get("rope_interleave", True)),
    )


def latent_scale(config: Mapping[str, Any]) -> float:
    """Factor of the scores: with YaRN, sharpened for the longer context."""
    dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if rope.get("mscale_all_dim"):
        return float(yarn_scale(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2 * dim**-0.5)
    return float(dim**-0.5)


class LatentAttention(nn.Module):
    """Drop-in for `layers.Attention`."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self._config = config
        queries = config.heads * config.dim
        if config.query_rank:
            self.query_down = Projection(config.hidden, {"q_a_proj": config.query_rank}, config.bias)
            self.query_norm = RmsNorm(config.query_rank, config.eps)
            self.query = Projection(config.query_rank, {"q_b_proj": queries})
        else:
            self.query = Projection(config.hidden, {"q_proj": queries})
        down = {"kv_a_proj_with_mqa": config.rank + config.rotated}
        self.down = Projection(config.hidden, down, config.bias)
        self.norm = RmsNorm(config.rank, config.eps)
        up = {"kv_b_proj": config.heads * (config.unrotated + config.value)}
        self.up = Projection(config.rank, up)
        self.out = Projection(config.heads * config.value, {"o_proj": config.hidden}, config.bias)

    def forward(self, x_TW: Tensor, angles: Angles, attend: Attend, wanted_R: Tensor | None = None) -> Tensor:
        """[T, W] to [T, W], or to the wanted rows [R, W]."""
        config = self._config
        q_TF = self.query(self.query_norm(self.query_down(x_TW)) if config.query_rank else x_TW)
        q_THD = q_TF.unflatten(-1, (config.heads, config.dim))
        latent_TL, shared_TP = self.down(x_TW).split([config.rank, config.rotated], dim=-1)
        both_THF = self.up(self.norm(latent_TL)).unflatten(-1, (config.heads, -1))
        k_THN, v_THV = both_THF.split([config.unrotated, config.value], dim=-1)
        q_THN, q_THP = q_THD.split([config.unrotated, config.rotated], dim=-1)
        q_THP, k_T1P = self._turn(q_THP, angles), self._turn(shared_TP[:, None], angles)
        q_RHD = picked(torch.cat([q_THN, q_THP], -1), wanted_R)
        k_THD = torch.cat([k_THN, k_T1P.expand(-1, config.heads, -1)], -1)
        v_THD = F.pad(v_THV, (0, config.dim - config.value))
        mixed_RHD = attend(q_RHD, k_THD, v_THD).unflatten(-1, (config.heads, config.dim))
        out_RW: Tensor = self.out(mixed_RHD[..., : config.value].flatten(1))
        return out_RW

    def _turn(self, x_THP: Tensor, angles: Angles) -> Tensor:
        if self._config.interleaved:  # pairs lie side by side; queries and keys are reordered alike
            x_THP = torch.cat([x_THP[..., 0::2], x_THP[..., 1::2]], -1)
        return rotate(x_THP, angles)

    def slots(self, at: str) -> Iterator[Slot]:
        """Tensors below `at`, which ends with a dot."""
        if self._config.query_rank:
            yield from self.query_down.slots(at)
            yield from self.query_norm.slots(f"{at}q_a_layernorm")
        yield from self.query.slots(at)
        yield from self.down.slots(at)
        yield from self.norm.slots(f"{at}kv_a_layernorm")
        yield from self.up.slots(at)
        yield from self.out.slots(at)
