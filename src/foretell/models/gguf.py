"""Turns a GGUF file into a Hugging Face folder: config.json, safetensors, tokenizer, chat template.

Matrices are stored in fp16 (the formats here hold 2.5 to 8.5 bits a weight, so fp16 rounds far below
what quantisation did), vectors in fp32. The folder is written beside its final name and renamed, so
an interrupted conversion never looks complete.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.models.gguf_tokenizer import write_tokenizer

Progress = Callable[[int, int], None]  # (bytes of tensors done, bytes in all)

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SHARD_BYTES = 2_000_000_000
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


class _File:
    """A GGUF file, checked: every tensor lies inside it.

    Raises:
        InputError: it is not GGUF, or damaged, or truncated.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.fields = {name: field.contents() for name, field in self._reader.fields.items()}
            self.tensors = list(self._reader.tensors)
        except Exception as error:  # the reader raises whatever the damaged bytes lead it to
            raise InputError(
                f"{path} is not a readable GGUF file (damaged or truncated): {error}",
                hint="download it again and compare its size and SHA-256",
            ) from error
        size = path.stat().st_size
        for tensor in self.tensors:
            end = tensor.data_offset + tensor.n_bytes
            if end > size:
                raise InputError(f"{path} is truncated: {tensor.name} ends at byte {end}, the file at {size}")

    def field(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise InputError(f"{self.path} is damaged: it has no field {name}") from None


def convert_gguf(path: Path, target: Path, progress: Progress | None = None) -> Path:
    """Writes the model folder `target` from the GGUF file `path`.

    Raises:
        InputError: the file is damaged, its architecture, tokenizer or a tensor type is not
            supported, or the disk is full. Nothing is left behind.
    """
    source = _File(path)
    config = _config(source)
    needed = sum(2 * int(np.prod(tensor.shape)) for tensor in source.tensors)
    free = shutil.disk_usage(target.parent).free
    if free < needed * 1.05:
        raise InputError(
            f"converting {path.name} needs {needed / 1e9:.2f} GB in {target.parent}, "
            f"{free / 1e9:.2f} GB are free",
            hint="make room, or set FORETELL_HOME to a larger disk",
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / "model"
        made.mkdir()
        try:
            write_tokenizer(source.fields, made)
            _write_json(made / "config.json", config)
            _write_weights(source, config, made, progress)
            made.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
                return target  # another process finished first
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InputError(
                    f"the disk filled up while {path.name} was converted into {target.parent}"
                ) from error
            raise
    return target


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(source: _File) -> dict[str, Any]:
    """The config.json that describes the file."""
    arch = source.field("general.architecture")
    if arch not in _ARCHITECTURES:
        raise InputError(f"{source.path.name} holds a {arch!r} model; supported: {', '.join(_ARCHITECTURES)}")
    names = {tensor.name for tensor in source.tensors}
    if "rope_freqs.weight" in names or f"{arch}.rope.scaling.type" in source.fields:
        raise InputError(
            f"{source.path.name} stretches its rotary embedding, which the GGUF loader cannot read yet"
        )
    heads, hidden = source.field(f"{arch}.attention.head_count"), source.field(f"{arch}.embedding_length")
    dim = source.fields.get(f"{arch}.attention.key_length", hidden // heads)
    if (rotated := source.fields.get(f"{arch}.rope.dimension_count", dim)) != dim:
        raise InputError(f"{source.path.name} rotates {rotated} of {dim} dimensions, which is not supported")
    embeddings = [tensor for tensor in source.tensors if tensor.name == "token_embd.weight"]
    if len(embeddings) != 1:
        raise InputError(f"{source.path.name} is damaged: it has {len(embeddings)} tensors token_embd.weight")
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.field(f"{arch}.feed_forward_length"),
        "num_hidden_layers": source.field(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.fields.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": source.field(f"{arch}.context_length"),
        "rms_norm_eps": source.field(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": source.fields.get(f"{arch}.rope.freq_base", 10000.0),
        "vocab_size": int(embeddings[0].shape[1]),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": source.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(source.fields),
        "torch_dtype": "float16",
    }


def _hf_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        at, rest = f"model.layers.{parts[1]}", parts[2]
        if rest in _LAYER:
            return f"{at}.{_LAYER[rest]}"
        block, _, kind = rest.rpartition(".")
        if block in _LAYER and kind in ("weight", "bias"):
            return f"{at}.{_LAYER[block]}.{kind}"
    return None


def _end_ids(fields: Mapping[str, Any]) -> list[int] | None:
    """The end tokens: those that the file names, and the control tokens that end a turn or a text."""
    named = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {int(token) for token in named if token is not None}
    tokens, types = fields.get("tokenizer.ggml.tokens", ()), fields.get("tokenizer.ggml.token_type", ())
    if ids:  # Qwen's base text ends with one token, its chat turns with another
        control = (
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == 3 and token in _ENDS
        )
        ids.update(control)
    return sorted(ids) or None


def _write_weights(source: _File, config: Mapping[str, Any], folder: Path, progress: Progress | None) -> None:
    """Writes shards of about 2 GB and their index."""
    from safetensors.numpy import save_file

    total = sum(tensor.n_bytes for tensor in source.tensors)
    done = 0
    shard: dict[str, np.ndarray[Any, Any]] = {}
    written: list[tuple[Path, list[str]]] = []

    def flush() -> None:
        path = folder / f"model-{len(written) + 1:05}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for tensor in source.tensors:
        name, value = _dequantised(source, tensor, config)
        shard[name] = value
        done += tensor.n_bytes
        if sum(part.nbytes for part in shard.values()) > _SHARD_BYTES:
            flush()
        if progress:
            progress(done, total)
    if shard:
        flush()
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return
    where = {name: path.name for path, names in written for name in names}
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
    )


def _dequantised(source: _File, tensor: Any, config: Mapping[str, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """A tensor's Hugging Face name and value, fp16 for matrices and fp32 for vectors."""
    import gguf.quants

    name = _hf_name(tensor.name)
    if name is None:
        raise InputError(f"{source.path.name} holds a tensor that is not known: {tensor.name}")
    try:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise InputError(
            f"{source.path.name}: {tensor.name} has type {kind}, which cannot be read"
        ) from error
    # the reader lists the fastest dimension first; numpy's data come the other way round
    value = value.reshape(tuple(reversed([int(n) for n in tensor.shape])))
    if config["model_type"] == "llama" and ".attn_q." in tensor.name:
        value = _unpermute(value, config["num_attention_heads"])
    if config["model_type"] == "llama" and ".attn_k." in tensor.name:
        value = _unpermute(value, config["num_key_value_heads"])
    if not np.isfinite(value).all():
        raise InputError(f"{source.path.name} is damaged: {tensor.name} holds values that are not finite")
    return name, np.ascontiguousarray(value, dtype=np.float16 if value.ndim > 1 else np.float32)


def _unpermute(value: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Llama files interleave each head's two rotary halves; Hugging Face keeps them apart."""
    shape = value.shape
    return value.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
