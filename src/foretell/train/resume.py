"""A head to go on from: any published checkpoint of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretell.heads.checkpoint import KIND
from foretell.heads.eagle import load_eagle
from foretell.heads.eagle3 import load_eagle3
from foretell.heads.medusa import load_medusa
from foretell.heads.mtp import load_mtp
from foretell.models.base import TargetModel
from foretell.models.config import read_config
from foretell.train.decoder import load_small

_Load = Callable[[Path, TargetModel], nn.Module]
_LOADERS: dict[str, _Load] = {
    "medusa": lambda folder, t: load_medusa(folder, t.hidden_size, t.vocab_size),
    "eagle": lambda folder, t: load_eagle(folder, t.hidden_size, t.vocab_size),
    "eagle3": lambda folder, t: load_eagle3(folder, t.num_layers, t.hidden_size, t.vocab_size),
    "draft": lambda folder, t: load_small(folder, t.vocab_size),
    "mtp": lambda folder, t: load_mtp(folder, t.hidden_size, t.vocab_size),
}

KINDS = tuple(_LOADERS)


def load_head(kind: str, folder: Path, target: TargetModel) -> tuple[nn.Module, dict[str, Any]]:
    """The head of a checkpoint in float32, ready to train, and its config.json.

    Raises:
        InputError: it is no such head, or made for a target of other measures.
    """
    head = _LOADERS[kind](folder, target)
    config = {**read_config(folder), "vocab_size": target.vocab_size}
    config.pop(KIND, None)
    head = head.to(device=target.device, dtype=torch.float32)
    return head.requires_grad_(True), config
