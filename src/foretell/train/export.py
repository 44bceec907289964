"""A trained head as a checkpoint: config.json and model.safetensors.

Our own format is the published layout of the head's kind, with `foretell_head` in config.json as the
discriminator; so SafeAILab's, SpecForge's and vLLM's loaders read it as it is.

Shape suffixes: V draft vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretell.heads.checkpoint import KIND
from foretell.heads.vocabulary import vocabulary_maps
from foretell.train.files import disk_error, replaced


def save_head(
    kind: str,
    head: nn.Module,
    config: Mapping[str, Any],
    ids_V: Tensor | None,
    folder: Path,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes a head; the files of an earlier one are replaced only by whole ones.

    Args:
        kind: "medusa", "eagle", "eagle3", "mtp", or "draft" (a whole model).
        config: of its layout, with the target's `vocab_size`.
        ids_V: target ids of its draft vocabulary; None = all.

    Raises:
        InputError: the folder cannot be written.
    """
    rename = prefix_of(kind, config)
    tensors = {rename(s.name): s.view.detach().to("cpu", dtype).contiguous() for s in head.slots()}  # type: ignore[operator]
    if ids_V is not None:
        tensors |= vocabulary_maps(ids_V.cpu(), int(config["vocab_size"]))
    about = {KIND: kind, **config, "torch_dtype": str(dtype).removeprefix("torch.")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / "model.safetensors") as half:
            save_file(tensors, half, metadata={"format": "pt"})
        with replaced(folder / "config.json") as half:
            half.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise disk_error(error, folder, "the last checkpoint is kept") from error


def prefix_of(kind: str, config: Mapping[str, Any]) -> Callable[[str], str]:
    """From a slot's name to that of the published layout."""
    prefixes = {"medusa": "medusa_head.", "mtp": f"model.layers.{config.get('num_hidden_layers')}."}
    prefix = prefixes.get(kind, "")
    return lambda name: prefix + name


def copy_tokenizer(source: Path, folder: Path) -> None:
    """What makes a distilled model's folder complete: the target's tokenizer and end tokens."""
    for pattern in ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*"):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
