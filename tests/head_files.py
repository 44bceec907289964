"""Tiny random draft heads, written exactly as they are published: names, shapes, config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV, DIM, VOCAB, LAYERS = 32, 48, 4, 2, 8, 96, 8
TARGET = {"num_hidden_layers": LAYERS}  # overrides of tests.zoo for the target of these heads
Tensors = dict[str, Tensor]


def random(*shape: int, seed: list[int]) -> Tensor:
    """Weights as in a trained head; norms (one dimension) lie around one."""
    seed[0] += 1
    generator = torch.Generator().manual_seed(seed[0])
    value = torch.randn(shape, generator=generator)
    return 1 + 0.2 * value if len(shape) == 1 else 0.2 * value


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def layer(at: str, inputs: int, seed: list[int], *, bias: bool = False, out_bias: bool = False) -> Tensors:
    """Attention and MLP by Llama's names."""
    shapes = {"q_proj": (HEADS * DIM, inputs), "k_proj": (KV * DIM, inputs), "v_proj": (KV * DIM, inputs)}
    out = {f"{at}self_attn.{name}.weight": random(*shape, seed=seed) for name, shape in shapes.items()}
    if bias:
        out |= {f"{at}self_attn.{n}.bias": random(s[0], seed=seed) - 1 for n, s in shapes.items()}
    out[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * DIM, seed=seed)
    out[f"{at}mlp.gate_proj.weight"] = random(INNER, HIDDEN, seed=seed)
    out[f"{at}mlp.up_proj.weight"] = random(INNER, HIDDEN, seed=seed)
    out[f"{at}mlp.down_proj.weight"] = random(HIDDEN, INNER, seed=seed)
    out[f"{at}post_attention_layernorm.weight"] = random(HIDDEN, seed=seed)
    return out


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        **changes,
    }


def eagle(folder: Path, *, bias: bool | None = None, own_embedding: bool = True, qwen: bool = False) -> Path:
    """SafeAILab/EAGLE, v1: pytorch_model.bin. `bias` None = the key is absent, which means there is one."""
    seed = [100]
    config = llama_config(**({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} if qwen else {}))
    if bias is not None:
        config["bias"] = bias
    tensors = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN, seed=seed),
        **layer("layers.0.", HIDDEN, seed, bias=qwen),
    }
    if bias is not False:
        tensors["fc.bias"] = random(HIDDEN, seed=seed) - 1
    if own_embedding:
        tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN, seed=seed)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(DIM // 2)
    return write(folder, config, tensors, "pytorch_model.bin")


def draft_ids(size: int) -> tuple[Tensor, Tensor]:
    """d2t (differences) and t2d of a reduced vocabulary."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:size].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(size), t2d


def eagle3(
    folder: Path, layout: str, *, reduced: int | None = 60, own_embedding: bool = True, **flags: Any
) -> Path:
    """`layout`: safeailab, specforge, angelslim or speculators."""
    seed = [200]
    at = "midlayer." if layout in ("safeailab", "specforge") else "layers.0."
    size = reduced or VOCAB
    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN, seed=seed),
        **layer(at, 2 * HIDDEN, seed),
        f"{at}hidden_norm.weight": random(HIDDEN, seed=seed),
        f"{at}input_layernorm.weight": random(HIDDEN, seed=seed),
        "norm.weight": random(HIDDEN, seed=seed),
        "lm_head.weight": random(size, HIDDEN, seed=seed),
    }
    if reduced:
        tensors["d2t"], tensors["t2d"] = draft_ids(reduced)
    if own_embedding:
        tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN, seed=seed)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = random(3 * HIDDEN, seed=seed)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random(HIDDEN, seed=seed) for i in range(3)}
    ids = flags.pop("ids", None)
    if layout == "speculators":
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
            "transformer_layer_config": llama_config(),
            "draft_vocab_size": size,
            "target_hidden_size": None,
            "norm_before_residual": False,
            **flags,
        }
        if ids is not None:
            config["eagle_aux_hidden_state_layer_ids"] = ids
    else:
        names = {"angelslim": "Eagle3LlamaForCausalLM"}
        config = llama_config(
            architectures=[names.get(layout, "LlamaForCausalLMEagle3")], draft_vocab_size=size
        )
        config |= flags
        if ids is not None:
            config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    file = "pytorch_model.bin" if layout == "safeailab" else "model.safetensors"
    return write(folder, config, tensors, file)


def medusa(folder: Path, layout: str, *, heads: int = 3, own_output: bool = True) -> Path:
    """`layout`: v0.1 (medusa_lm_head.pt without prefix, wrong count in the config) or v1.0."""
    seed = [300]
    prefix = "" if layout == "v0.1" else "medusa_head."
    tensors: Tensors = {}
    for k in range(heads):
        tensors[f"{prefix}{k}.0.linear.weight"] = random(HIDDEN, HIDDEN, seed=seed)
        tensors[f"{prefix}{k}.0.linear.bias"] = random(HIDDEN, seed=seed) - 1
        if own_output:
            tensors[f"{prefix}{k}.1.weight"] = random(VOCAB, HIDDEN, seed=seed)
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    return write(folder, config, tensors, "medusa_lm_head.pt" if layout == "v0.1" else "model.safetensors")


def mimo(folder: Path) -> Path:
    """XiaomiMiMo: Qwen2's layer, hidden state first."""
    seed, at = [400], "model.mtp_layers.0."
    tensors = layer(at, HIDDEN, seed, bias=True)
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        tensors[f"{at}{name}.weight"] = random(HIDDEN, seed=seed)
    tensors[f"{at}input_proj.weight"] = random(HIDDEN, 2 * HIDDEN, seed=seed)
    config = llama_config(
        architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True, num_nextn_predict_layers=1
    )
    return write(folder, config, tensors)


def _expert(at: str, inner: int, seed: list[int]) -> Tensors:
    return {
        f"{at}gate_proj.weight": random(inner, HIDDEN, seed=seed),
        f"{at}up_proj.weight": random(inner, HIDDEN, seed=seed),
        f"{at}down_proj.weight": random(HIDDEN, inner, seed=seed),
    }


QWEN_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def qwen3_next(folder: Path, *, experts: bool = True) -> Path:
    """Qwen3-Next: gated attention, norms with 1 + weight, a mixture of experts."""
    seed, at, dim = [500], "mtp.layers.0.", 16
    config = llama_config(**QWEN_NEXT)
    tensors = {
        "mtp.fc.weight": random(HIDDEN, 2 * HIDDEN, seed=seed),
        f"{at}self_attn.q_proj.weight": random(2 * HEADS * dim, HIDDEN, seed=seed),
        f"{at}self_attn.k_proj.weight": random(KV * dim, HIDDEN, seed=seed),
        f"{at}self_attn.v_proj.weight": random(KV * dim, HIDDEN, seed=seed),
        f"{at}self_attn.o_proj.weight": random(HIDDEN, HEADS * dim, seed=seed),
    }
    names = [f"mtp.{n}" for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    names += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
    tensors |= {f"{name}.weight": random(HIDDEN, seed=seed) - 1 for name in names}
    tensors |= {f"{at}self_attn.{n}.weight": random(dim, seed=seed) - 1 for n in ("q_norm", "k_norm")}
    if experts:
        tensors[f"{at}mlp.gate.weight"] = random(4, HIDDEN, seed=seed)
        for i in range(4):
            tensors |= _expert(f"{at}mlp.experts.{i}.", 24, seed)
        tensors |= _expert(f"{at}mlp.shared_expert.", 24, seed)
        tensors[f"{at}mlp.shared_expert_gate.weight"] = random(1, HIDDEN, seed=seed)
    else:
        config["num_experts"] = 0
        tensors |= _expert(f"{at}mlp.", INNER, seed)
    return write(folder, config, tensors)


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def deepseek(folder: Path) -> Path:
    """DeepSeek-V3: latent attention with YaRN, grouped sigmoid routing, own copies of embedding and head."""
    seed, at = [600], "model.layers.1."
    config = llama_config(**DEEPSEEK)
    shapes = {
        "self_attn.q_a_proj": (16, HIDDEN),
        "self_attn.q_b_proj": (HEADS * 16, 16),
        "self_attn.kv_a_proj_with_mqa": (16 + 8, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * 16, 16),
        "self_attn.o_proj": (HIDDEN, HEADS * 8),
        "mlp.gate": (4, HIDDEN),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "embed_tokens": (VOCAB, HIDDEN),
        "shared_head.head": (VOCAB, HIDDEN),
    }
    tensors = {f"{at}{name}.weight": random(*shape, seed=seed) for name, shape in shapes.items()}
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"{at}{name}.weight": random(HIDDEN, seed=seed) for name in norms}
    tensors |= {
        f"{at}self_attn.{n}.weight": random(16, seed=seed) for n in ("q_a_layernorm", "kv_a_layernorm")
    }
    tensors[f"{at}mlp.gate.e_score_correction_bias"] = random(4, seed=seed) - 1
    for i in range(4):
        tensors |= _expert(f"{at}mlp.experts.{i}.", 24, seed)
    tensors |= _expert(f"{at}mlp.shared_experts.", 24, seed)
    return write(folder, config, tensors)


def every_kind(root: Path) -> dict[str, Path]:
    """A head of every drafter that has one."""
    return {
        "medusa": medusa(root / "medusa", "v1.0"),
        "eagle": eagle(root / "eagle"),
        "eagle3": eagle3(root / "eagle3", "speculators"),
        "mtp": mimo(root / "mtp"),
    }
