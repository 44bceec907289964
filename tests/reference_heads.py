"""Draft heads once more, in plain dense torch, from the published tensors: what the real ones must equal.

Every reference is a function (tokens, features or states, path) -> logits [V] of what follows `path`
after the text: rows are run from scratch, without cache, batch or tree. MTP modules use transformers' own
decoder layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.suffix in (".bin", ".pt"):
            tensors |= torch.load(path)
    return config, tensors


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(
    w: dict[str, Tensor], at: str, x: Tensor, heads: int, kv: int, theta: float = 10000.0
) -> Tensor:
    """Causal attention over rows at positions 0, 1, ...; one head at a time."""
    get = lambda name: x @ w[f"{at}{name}.weight"].T + w.get(f"{at}{name}.bias", torch.zeros(()))  # noqa: E731
    q, k, v = get("q_proj"), get("k_proj"), get("v_proj")
    rows, dim = len(x), q.shape[1] // heads
    angle = torch.arange(rows)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)

    def turn(part: Tensor) -> Tensor:
        a, b = part[:, : dim // 2], part[:, dim // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    out = []
    for h in range(heads):
        g = h // (heads // kv)
        query, key = turn(q[:, h * dim : (h + 1) * dim]), turn(k[:, g * dim : (g + 1) * dim])
        scores = query @ key.T / dim**0.5
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ v[:, g * dim : (g + 1) * dim])
    return torch.cat(out, 1) @ w[f"{at}o_proj.weight"].T


def mlp(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{at}gate_proj.weight"].T, x @ w[f"{at}up_proj.weight"].T
    return (gate / (1 + (-gate).exp()) * up) @ w[f"{at}down_proj.weight"].T


Step = Callable[[Tensor, Tensor], Tensor]  # (embeddings [T, W], features [T, W]) -> outputs [T, W]


def unroll(
    embed: Callable[[Tensor], Tensor],
    step: Step,
    feedback: Callable[[Tensor], Tensor],
    features: Tensor,
    tokens: Sequence[int],
    path: Sequence[int],
) -> Tensor:
    """Output of the last row: the text's rows have true features, those of `path` predicted ones."""
    row_tokens = list(tokens[1:])
    rows = features[: len(row_tokens)]
    out = step(embed(torch.tensor(row_tokens)), rows)
    for token in path:
        row_tokens.append(token)
        rows = torch.cat([rows, feedback(out[-1:])])
        out = step(embed(torch.tensor(row_tokens)), rows)
    return out[-1]


class Eagle:
    """EAGLE-1/2."""

    def __init__(self, folder: Path, target: Any) -> None:
        self.config, self.w = read(folder)
        self.target = target

    def states(self, hidden: Tensor, aux: dict[int, Tensor]) -> Tensor:
        return hidden

    def embed(self, ids: Tensor) -> Tensor:
        return (
            self.w["embed_tokens.weight"][ids] if "embed_tokens.weight" in self.w else self.target.embed(ids)
        )

    def step(self, embed: Tensor, features: Tensor) -> Tensor:
        w, c = self.w, self.config
        x = torch.cat([embed, features], 1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
        x = x + attention(w, "layers.0.self_attn.", x, c["num_attention_heads"], c["num_key_value_heads"])
        return x + mlp(w, "layers.0.mlp.", norm(x, w["layers.0.post_attention_layernorm.weight"]))

    def logits(self, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        return self.target.head(unroll(self.embed, self.step, lambda x: x, features, tokens, path)[None])[0]


class Eagle3(Eagle):
    """EAGLE-3; `aux` are the layers whose inputs it reads, as the test knows them."""

    def __init__(self, folder: Path, target: Any, aux: Sequence[int]) -> None:
        super().__init__(folder, target)
        self.aux = aux
        self.at = "layers.0." if "layers.0.hidden_norm.weight" in self.w else "midlayer."
        self.layer = self.config.get("transformer_layer_config", self.config)

    def states(self, hidden: Tensor, aux: dict[int, Tensor]) -> Tensor:
        w = self.w
        parts = [aux[i] for i in self.aux]
        if self.config.get("fc_norm"):
            parts = [norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)]
        x = torch.cat(parts, 1)
        if self.config.get("norm_before_fc"):
            x = norm(x, w["input_norm.weight"])
        return x @ w["fc.weight"].T

    def step(self, embed: Tensor, features: Tensor) -> Tensor:
        w, at, c = self.w, self.at, self.layer
        e, h = norm(embed, w[f"{at}input_layernorm.weight"]), norm(features, w[f"{at}hidden_norm.weight"])
        residual = h if self.config.get("norm_before_residual") else features
        both = torch.cat([e, h], 1)
        x = residual + attention(
            w, f"{at}self_attn.", both, c["num_attention_heads"], c["num_key_value_heads"]
        )
        return x + mlp(w, f"{at}mlp.", norm(x, w[f"{at}post_attention_layernorm.weight"]))

    def logits(self, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        w = self.w
        normed = lambda x: norm(x, w["norm.weight"])  # noqa: E731
        feedback = normed if self.config.get("norm_output") else (lambda x: x)
        out = normed(unroll(self.embed, self.step, feedback, features, tokens, path)) @ w["lm_head.weight"].T
        if "d2t" not in w:
            return out
        full = torch.full((self.target.vocab_size,), -torch.inf)
        for i, value in enumerate(out.tolist()):
            full[i + int(w["d2t"][i])] = value
        return full


class Mtp(Eagle):
    """DeepSeek-V3, Qwen3-Next and MiMo, by transformers' decoder layers."""

    def __init__(self, folder: Path, target: Any, family: str) -> None:
        super().__init__(folder, target)
        self.family = family
        self.at = {"deepseek": "model.layers.1.", "qwen3_next": "mtp.", "mimo": "model.mtp_layers.0."}[family]
        self.block, self.rotary = self._block()

    def _block(self) -> tuple[Any, Any]:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
        from transformers.models.qwen2 import modeling_qwen2 as qwen2
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3

        made = {
            "deepseek": (
                deepseek.DeepseekV3Config,
                deepseek.DeepseekV3DecoderLayer,
                deepseek.DeepseekV3RotaryEmbedding,
            ),
            "qwen3_next": (
                qwen3.Qwen3NextConfig,
                qwen3.Qwen3NextDecoderLayer,
                qwen3.Qwen3NextRotaryEmbedding,
            ),
            "mimo": (qwen2.Qwen2Config, qwen2.Qwen2DecoderLayer, qwen2.Qwen2RotaryEmbedding),
        }
        config_class, layer_class, rotary_class = made[self.family]
        values = {k: v for k, v in self.config.items() if k not in ("architectures", "model_type")}
        if self.family == "qwen3_next":
            values |= {"layer_types": ["full_attention"]}
        config = config_class(**values, attn_implementation="eager")
        layer = layer_class(config, 0).float().eval()
        prefix = self.at + ("layers.0." if self.family == "qwen3_next" else "")
        own = {n.removeprefix(prefix): t for n, t in self.w.items() if n.startswith(prefix)}
        state = layer.state_dict()
        if "mlp.experts.gate_up_proj" in state:  # transformers keeps all experts in one tensor
            count = len(state["mlp.experts.gate_up_proj"])
            parts = [
                [own[f"mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up", "down")]
                for i in range(count)
            ]
            own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in parts])
            own["mlp.experts.down_proj"] = torch.stack([d for _, _, d in parts])
        layer.load_state_dict({name: own[name] for name in state})
        return layer, rotary_class(config)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[f"{self.at}{name}.weight"]
        return norm(x, 1 + weight if self.family == "qwen3_next" else weight)

    def embed(self, ids: Tensor) -> Tensor:
        own = f"{self.at}embed_tokens.weight"
        return self.w[own][ids] if own in self.w else self.target.embed(ids)

    def step(self, embed: Tensor, features: Tensor) -> Tensor:
        names = {
            "deepseek": ("enorm", "hnorm", "eh_proj"),
            "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
            "mimo": ("token_layernorm", "hidden_layernorm", "input_proj"),
        }[self.family]
        if self.family != "qwen3_next":
            embed = embed.clone()
            embed[0] = 0
        e, h = self._norm(names[0], embed), self._norm(names[1], features)
        both = torch.cat([h, e] if self.family == "mimo" else [e, h], 1)
        x = (both @ self.w[f"{self.at}{names[2]}.weight"].T)[None]
        rows = x.shape[1]
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        with torch.inference_mode():
            out = self.block(
                x,
                position_embeddings=self.rotary(x, positions),
                attention_mask=mask,
                position_ids=positions,
            )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        final = {"deepseek": "shared_head.norm", "qwen3_next": "norm", "mimo": "final_layernorm"}[self.family]
        feedback = (lambda x: x) if self.family == "deepseek" else (lambda x: self._norm(final, x))
        out = self._norm(final, unroll(self.embed, self.step, feedback, features, tokens, path))
        own = f"{self.at}shared_head.head.weight"
        return out @ self.w[own].T if own in self.w else self.target.head(out[None])[0]
