"""What the own decoder reads from a Hugging Face `config.json`, and what it must leave to the
transformers adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError

Json = Mapping[str, Any]


class Unsupported(Exception):
    """The own decoder cannot run this configuration; the message says why."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, and how frequencies are stretched."""

    theta: float
    kind: str = "default"  # default, linear, llama3, yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0  # of cos and sin
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and flags of the own decoder. `windows` holds each layer's sliding window or None."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]


# architecture -> (bias on q, k, v unless attention_bias says so; norm of q and k heads)
ARCHITECTURES: Mapping[str, tuple[bool, bool]] = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
    "MiMoForCausalLM": (True, False),
}


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """`config.json`, or another JSON object, of a model folder.

    Raises:
        InputError: it is missing or is not a JSON object.
    """
    path = folder / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} is not a model folder: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} should hold a JSON object, not {type(config).__name__}")
    return config


def architecture_of(config: Json) -> str:
    """The first entry of `architectures`, or what `model_type` implies."""
    names = config.get("architectures") or []
    if names:
        return str(names[0])
    kinds = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    kind = str(config.get("model_type", ""))
    return f"{kinds.get(kind, kind)}ForCausalLM"


def decoder_config(config: Json) -> DecoderConfig:
    """The own decoder's configuration.

    Raises:
        Unsupported: the architecture or one of its settings needs the transformers adapter.
        InputError: a needed key is missing.
    """
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        raise Unsupported(f"architecture {architecture} is not one of {', '.join(ARCHITECTURES)}")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise Unsupported(f"hidden_act is {act!r}, not 'silu'")
    if config.get("quantization_config"):
        raise Unsupported("the checkpoint is quantised (quantization_config)")
    qkv_bias, qk_norm = ARCHITECTURES[architecture]
    bias = bool(config.get("attention_bias", False))
    try:
        hidden, heads, layers = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        return DecoderConfig(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_context=int(config["max_position_embeddings"]),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias or bias,
            out_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
            windows=_windows(config, architecture, layers),
        )
    except KeyError as error:
        raise InputError(f"config.json lacks {error}, which {architecture} needs") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"config.json holds a value that {architecture} cannot use: {error}") from error


def read_rope(config: Json) -> Rope:
    """The rotary embedding of a configuration.

    Raises:
        ValueError: of a kind that is not implemented.
        KeyError: a needed value is missing.
    """
    # transformers 5 writes rope_parameters; before that rope_theta and rope_scaling
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(parameters["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return Rope(
            theta,
            kind,
            float(parameters["factor"]),
            original_context=int(original),
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            magnitude=_yarn_magnitude(parameters),
            truncate=bool(parameters.get("truncate", True)),
        )
    raise ValueError(f"rope type {kind!r} is not one of default, linear, llama3, yarn")


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention for a stretched context (Peng et al. 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_magnitude(parameters: Json) -> float:
    """Factor of cos and sin."""
    factor, given = float(parameters["factor"]), parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_scale(factor, float(mscale)) / yarn_scale(factor, float(all_dim))
    return yarn_scale(factor)


def _rope(config: Json) -> Rope:
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise Unsupported("partial_rotary_factor is not 1")
    try:
        return read_rope(config)
    except ValueError as reason:
        raise Unsupported(str(reason)) from None


def _windows(config: Json, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * layers
    if kinds := config.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    full = int(config.get("max_window_layers", 0)) if architecture.startswith("Qwen") else 0
    return tuple(None if layer < full else int(window) for layer in range(layers))
