"""A draft vocabulary: the target ids that a head ranks, in a checkpoint (`d2t`) and as rows of the target's
output head.

Any head may have one. Heads without an output layer of their own then use those rows of the target's alone
(FR-Spec, Zhao et al. 2025).

Shape suffixes: V draft vocabulary, W hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.weights import Checkpoint

MAPS = r"(d2t|t2d)$"  # tensors that are no weights
_UNITS = 64  # unit vectors in one product


def read_target_ids(checkpoint: Checkpoint, vocab_size: int) -> Tensor | None:
    """Target id of each draft id, from `d2t`, which holds the differences; None = the file has none.

    Raises:
        InputError: they are no different ids of the target.
    """
    if "d2t" not in checkpoint:
        return None
    (size,) = checkpoint.shape("d2t")
    ids_V = torch.arange(size) + checkpoint.get("d2t", (size,)).long()
    if bool((ids_V < 0).any()) or bool((ids_V >= vocab_size).any()) or len(ids_V.unique()) != size:
        raise InputError(f"{checkpoint.folder}: d2t does not lead to different ids below {vocab_size}")
    return ids_V


def vocabulary_maps(ids_V: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors `d2t` and `t2d` of a checkpoint."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids_V] = True
    return {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": known}


@torch.inference_mode()
def head_rows(target: TargetModel, ids_V: Tensor) -> Tensor:
    """Rows [V, W] of the target's output head: a linear map is what it makes of the unit vectors."""
    unit_WW = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    parts = [target.head(part_XW)[:, ids_V.to(target.device)] for part_XW in unit_WW.split(_UNITS)]
    return torch.cat(parts).T.contiguous()
