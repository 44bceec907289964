"""Builds tokenizer.json and the chat template from the metadata of a GGUF file.

GGUF names the pre-tokenizer instead of storing it; `_SPLITS` holds the rules of the supported names,
as in the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from foretell.errors import InputError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


def _smollm() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_SPLITS = {"smollm": _smollm, "qwen2": _qwen2}


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`.

    Raises:
        InputError: the file has no tokenizer, or one of a kind that is not supported.
    """
    try:
        kind, split = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
        tokens, types, merges = (
            fields[f"tokenizer.ggml.{part}"] for part in ("tokens", "token_type", "merges")
        )
    except KeyError as error:
        raise InputError(f"the GGUF file lacks its tokenizer: no field {error}") from error
    if kind != "gpt2" or split not in _SPLITS:
        known = ", ".join(f"gpt2/{name}" for name in _SPLITS)
        raise InputError(f"the GGUF file's tokenizer is of kind {kind}/{split}; supported: {known}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(m.split(" ")) for m in merges]))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"the GGUF file's tokenizer is damaged: {error}") from error
    tokenizer.normalizer = normalizers.NFC() if split == "qwen2" else None
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        (token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)
    ]
    for token, kind in added:
        tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        if (index := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
