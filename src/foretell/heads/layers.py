"""Building blocks of draft heads, differentiable, with attention left to the caller.

In inference attention reads the head's KV cache; in training it is dense. Either way a block hands over
rotated queries and keys and gets the mixed values back (`Attend`). Projections that share an input are
one product; `slots` tells where each published tensor lies in it.

Shape suffixes: T rows, R rows whose output is wanted, W hidden width, I width of what attention reads or
inner width of an MLP, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.models.config import Rope, read_rope

# (q [R, H, D], k [T, K, D], v [T, K, D]) -> [R, H * D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]  # cos and sin of each row, [T, rotated / 2]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a published tensor lies.

    Args:
        name: in the checkpoint.
        value: parameter that holds it.
        first, rows: its part of the parameter's first dimension.
    """

    name: str
    value: Tensor
    first: int
    rows: int

    @property
    def view(self) -> Tensor:
        return self.value[self.first : self.first + self.rows]


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Shape and flags of a head's decoder layer.

    Args:
        hidden, inner, heads, kv_heads, dim: widths.
        eps: of the norms.
        rope: rotary embedding; `rotated` of the `dim` dimensions turn.
        max_context: positions that the head was made for.
        qkv_bias, out_bias, mlp_bias: which projections have one.
        qk_norm: norms on q and k heads.
        gated: the queries bring a gate for the mixed values (Qwen3-Next).
        offset: norms multiply with 1 + weight.
        window: sliding window, or None.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    rope: Rope
    rotated: int
    max_context: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    offset: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        positive(self, "hidden", "inner", "heads", "kv_heads", "dim", "max_context")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not share {self.kv_heads} key/value heads evenly")
        if not 0 < self.rotated <= self.dim or self.rotated % 2:
            raise ValueError(f"{self.rotated} of {self.dim} dimensions of a head cannot be rotated")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window is {self.window}")


def positive(config: object, *names: str) -> None:
    """Raises ValueError unless these widths and counts are at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")


def block_config(config: Mapping[str, Any], **flags: Any) -> BlockConfig:
    """A layer from a Hugging Face configuration.

    Raises:
        KeyError, ValueError, TypeError: for the caller to report with the file's name.
    """
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {act!r}, not 'silu'")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or hidden // heads)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    share = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    sliding = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if "sliding_attention" not in (config.get("layer_types") or ["sliding_attention"]):
        sliding = None
    values: dict[str, Any] = {
        "hidden": hidden,
        "inner": int(config["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "dim": dim,
        "eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(config),
        "rotated": int(dim * share),
        "max_context": int(config.get("max_position_embeddings", 1 << 20)),
        "qkv_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "window": None if sliding is None else int(sliding),
    }
    values["out_bias"] = values["qkv_bias"]
    return BlockConfig(**{**values, **flags})


class RmsNorm(nn.Module):
    """x / rms(x) * weight, or * (1 + weight)."""

    def __init__(self, width: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self._offset = eps, float(offset)

    def forward(self, x_TW: Tensor) -> Tensor:
        """Over the last dimension, in the input's dtype."""
        return F.rms_norm(x_TW, (x_TW.shape[-1],), self.scales().to(x_TW.dtype), self.eps)

    def scales(self) -> Tensor:
        """What the normed values are multiplied with."""
        return self.weight + self._offset if self._offset else self.weight

    def slots(self, name: str) -> Iterator[Slot]:
        """One tensor, `name`.weight."""
        yield Slot(f"{name}.weight", self.weight, 0, len(self.weight))


class Projection(nn.Linear):
    """Several published projections of one input as one product.

    Args:
        inputs: width of the input.
        parts: published names and their widths, in order.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self._parts = dict(parts)

    def slots(self, at: str = "") -> Iterator[Slot]:
        """`at` + part + .weight (and .bias) for every part."""
        first = 0
        for name, rows in self._parts.items():
            yield Slot(f"{at}{name}.weight", self.weight, first, rows)
            if self.bias is not None:
                yield Slot(f"{at}{name}.bias", self.bias, first, rows)
            first += rows


def picked(x_TX: Tensor, wanted_R: Tensor | None) -> Tensor:
    """The wanted rows; None = all."""
    return x_TX if wanted_R is None else x_TX[wanted_R]


def rotate(x_THD: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of the first dimensions, halves paired (Llama's convention)."""
    cos_T1P, sin_T1P = (part[:, None].to(x_THD.dtype) for part in angles)
    half = cos_T1P.shape[-1]
    low, high, rest = x_THD[..., :half], x_THD[..., half : 2 * half], x_THD[..., 2 * half :]
    return torch.cat([low * cos_T1P - high * sin_T1P, high * cos_T1P + low * sin_T1P, rest], -1)


class Attention(nn.Module):
    """Grouped-query attention over an input of any width.

    Attributes:
        plain: all dimensions of a head are rotated, and nothing gates the mixed values.
    """

    def __init__(self, config: BlockConfig, inputs: int) -> None:
        super().__init__()
        self._config = config
        queries, keys = config.heads * config.dim, config.kv_heads * config.dim
        parts = {"q_proj": queries * (2 if config.gated else 1), "k_proj": keys, "v_proj": keys}
        self.qkv = Projection(inputs, parts, config.qkv_bias)
        self.out = Projection(queries, {"o_proj": config.hidden}, config.out_bias)
        norms = [RmsNorm(config.dim, config.eps, config.offset) for _ in range(2)] if config.qk_norm else []
        self.norms = nn.ModuleList(norms)
        self._widths = list(parts.values())
        self.plain = not config.gated and config.rotated == config.dim

    def forward(self, x_TI: Tensor, angles: Angles, attend: Attend, wanted_R: Tensor | None = None) -> Tensor:
        """[T, inputs] to [T, W], or to the wanted rows [R, W]; keys are made of all rows either way."""
        config = self._config
        q_TF, k_TF, v_TF = self.qkv(x_TI).split(self._widths, dim=-1)
        q_THD, k_TKD, v_TKD = (part.unflatten(-1, (-1, config.dim)) for part in (q_TF, k_TF, v_TF))
        gate_TF: Tensor | None = None
        if config.gated:  # each head's queries, then its gate
            q_THD, gate_THD = q_TF.unflatten(-1, (config.heads, 2 * config.dim)).chunk(2, dim=-1)
            gate_TF = picked(gate_THD, wanted_R).flatten(1)
        if config.qk_norm:
            q_THD, k_TKD = self.norms[0](q_THD), self.norms[1](k_TKD)
        q_RHD = picked(rotate(q_THD, angles), wanted_R)
        mixed_TF = attend(q_RHD, rotate(k_TKD, angles), v_TKD.contiguous())
        if gate_TF is not None:
            mixed_TF = mixed_TF * torch.sigmoid(gate_TF)
        out_TW: Tensor = self.out(mixed_TF)
        return out_TW

    def slots(self, at: str) -> Iterator[Slot]:
        """Tensors below `at`, which ends with a dot."""
        yield from self.qkv.slots(at)
        yield from self.out.slots(at)
        for norm, name in zip(self.norms, ("q_norm", "k_norm"), strict=False):
            assert isinstance(norm, RmsNorm)
            yield from norm.slots(f"{at}{name}")


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Projection(hidden, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down = Projection(inner, {"down_proj": hidden}, bias)

    def forward(self, x_TW: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        gate_TI, up_TI = self.gate_up(x_TW).chunk(2, dim=-1)
        out_TW: Tensor = self.down(F.silu(gate_TI) * up_TI)
        return out_TW

    def slots(self, at: str) -> Iterator[Slot]:
        """Tensors below `at`, which ends with a dot."""
        yield from self.gate_up.slots(at)
        yield from self.down.slots(at)


class Block(nn.Module):
    """A pre-norm decoder layer: attention and a gated MLP on a residual stream.

    Args:
        config: shape and flags.
        input_norm: whether attention's input is normed here (EAGLE-1's layer has no norm there).
        attention, mlp: others than the usual ones (latent attention, experts).
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        input_norm: bool = True,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        norm = RmsNorm(config.hidden, config.eps, config.offset)
        self.input_norm = norm if input_norm else None
        self.attention = attention or Attention(config, config.hidden)
        self.post_norm = RmsNorm(config.hidden, config.eps, config.offset)
        self.mlp = mlp or GatedMlp(config.hidden, config.inner, config.mlp_bias)

    def forward(
        self,
        x_TW: Tensor,
        angles: Angles,
        attend: Attend,
        wanted_R: Tensor | None = None,
        input_TI: Tensor | None = None,
    ) -> Tensor:
        """[T, W] to [T, W], or to the wanted rows [R, W]. Attention reads `input_TI`, by default the stream,
        normed where there is a norm."""
        if input_TI is None:
            input_TI = x_TW if self.input_norm is None else self.input_norm(x_TW)
        x_RW = picked(x_TW, wanted_R) + self.attention(input_TI, angles, attend, wanted_R)
        out_RW: Tensor = x_RW + self.mlp(self.post_norm(x_RW))
        return out_RW

    def slots(self, at: str) -> Iterator[Slot]:
        """Tensors below `at`, which ends with a dot, by Llama's names."""
        if self.input_norm is not None:
            yield from self.input_norm.slots(f"{at}input_layernorm")
        yield from self.attention.slots(f"{at}self_attn.")  # type: ignore[operator]
        yield from self.post_norm.slots(f"{at}post_attention_layernorm")
        yield from self.mlp.slots(f"{at}mlp.")  # type: ignore[operator]
