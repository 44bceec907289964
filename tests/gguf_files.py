"""Writes small GGUF files from random transformers models, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests import zoo

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHAPE = {
    "vocab_size": 304,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable characters that byte-level BPE uses for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary halves in llama files."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def quantised(weight: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in a GGUF type; K-quants, which gguf cannot write, as random blocks with sane scales."""
    target = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        return weight.astype(np.float32 if kind == "F32" else np.float16)
    if not kind.endswith("_K"):
        return gguf.quants.quantize(weight, target)
    block, size = gguf.GGML_QUANT_SIZES[target]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (weight.shape[0], weight.shape[1] // block, size), dtype=np.uint8)
    scale = np.array([0.002], dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        rows[..., -2:] = scale
    else:
        rows[..., 0:2] = rows[..., 2:4] = scale
    return rows.reshape(weight.shape[0], -1)


def write(path: Path, arch: str = "llama", kind: str = "F32", *, edit=None, **overrides):
    """Writes a file and returns the transformers model it was made from.

    `edit(writer_fields)` may change the metadata before it is written.
    """
    model = zoo.build(arch, **{**SHAPE, **overrides})
    config = model.config
    alphabet = byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "th", "he", "Ġt", "Ġth"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    fields = {
        "arch": arch,
        "pre": "smollm" if arch == "llama" else "qwen2",
        "tokens": tokens,
        "types": [3 if t.startswith("<") else 1 for t in tokens],
        "merges": ["t h", "h e", "Ġ t", "Ġt h"],
    }
    if edit:
        edit(fields)
    writer = gguf.GGUFWriter(path, fields["arch"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if fields["tokens"] is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(fields["pre"])
        writer.add_token_list(fields["tokens"])
        writer.add_token_types(fields["types"])
        writer.add_token_merges(fields["merges"])
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
        writer.add_chat_template(TEMPLATE)
    for name, parameter in model.state_dict().items():
        value = parameter.numpy()
        if arch == "llama" and "q_proj" in name:
            value = permute(value, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            value = permute(value, config.num_key_value_heads)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value.astype(np.float32))
        else:
            data = quantised(value, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
