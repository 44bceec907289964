"""Where a new head's layer begins: at the target's last layer, on the states that it reads.

A layer that was trained to turn late states into the next token is nearer to what is wanted than noise.

Shape suffixes: W hidden width, O outputs, I inputs.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.models.weights import Checkpoint

_log = logging.getLogger(__name__)
_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_PARTS = (*_ATTENTION, *_MLP, "post_attention_layernorm.weight")


def begin_at_last_layer(
    head: nn.Module, folder: Path, layers: int, *, at: str, norms: dict[str, str], fuse: nn.Linear
) -> None:
    """Copies what fits of the target's last layer; where nothing does, the head stays as it is.

    Args:
        head: with `slots`.
        folder: the target's checkpoint.
        at: prefix of the head's layer.
        norms: norm of the head -> norm of the target, by their names.
        fuse: joins what the head reads; it begins by handing on the last of its inputs.
    """
    names = {f"{at}{part}": f"model.layers.{layers - 1}.{part}" for part in _PARTS}
    names |= {f"{mine}.weight": f"{theirs}.weight" for mine, theirs in norms.items()}
    try:
        checkpoint = Checkpoint(folder)
    except InputError as reason:
        _log.warning("the head begins with random weights: %s", reason)
        return
    with torch.no_grad():
        for slot in head.slots():  # type: ignore[operator]
            name = names.get(slot.name)
            if name is not None and name in checkpoint:
                _copy(slot.view, checkpoint.get(name, checkpoint.shape(name)).float())
        width = fuse.out_features
        fuse.weight[:, -width:] += torch.eye(width)


def _copy(mine: Tensor, theirs: Tensor) -> None:
    """Of the same shape, or reading twice as much: what comes first, the embedding, counts nothing yet."""
    if mine.shape == theirs.shape:
        mine.copy_(theirs)
    elif mine.ndim == 2 and mine.shape == (theirs.shape[0], 2 * theirs.shape[1]):
        mine.zero_()
        mine[:, theirs.shape[1] :] = theirs
