"""MEDUSA heads (Cai et al. 2024): head k guesses token t + k + 2 from the last hidden state at t.

Published layouts: `medusa_head.{k}.{j}.linear` and `medusa_head.{k}.{L}` beside or inside a model, and
v0.1's `medusa_lm_head.pt` without the prefix. The configuration's head count is wrong in old files, so the
tensors are counted. Heads without an output layer of their own share the target's.

Shape suffixes: T rows, K heads, W hidden width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import check_kind, configured, fill
from foretell.heads.layers import Projection, Slot
from foretell.heads.vocabulary import MAPS, read_target_ids
from foretell.models.config import read_config
from foretell.models.weights import Checkpoint
from foretell.types import Needs

_NAME = re.compile(r"(medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")


class MedusaHeads(nn.Module):
    """Residual blocks per head, and an output layer per head or none.

    Args:
        count, depth: heads, and residual blocks of each.
        vocab_size: of their output layers; 0 = they share the target's.
    """

    needs = Needs(last_hidden=True)

    def __init__(self, hidden: int, count: int, depth: int, vocab_size: int = 0) -> None:
        super().__init__()
        self.count, self.depth = count, depth
        blocks = (
            nn.ModuleList(Projection(hidden, {f"{k}.{j}.linear": hidden}, bias=True) for j in range(depth))
            for k in range(count)
        )
        self.blocks = nn.ModuleList(blocks)
        outputs = (Projection(hidden, {f"{k}.{depth}": vocab_size}) for k in range(count) if vocab_size)
        self.outputs = nn.ModuleList(outputs)
        self.target_ids: Tensor | None = None  # of the target's head that they share; None = all

    def states(self, hidden_TW: Tensor) -> list[Tensor]:
        """Per head, what its output layer takes: [T, W]."""
        out = []
        for blocks in self.blocks:
            x_TW = hidden_TW
            for block in blocks:  # type: ignore[attr-defined]
                x_TW = x_TW + F.silu(block(x_TW))
            out.append(x_TW)
        return out

    def slots(self) -> Iterator[Slot]:
        """The published tensors, without prefix."""
        for projection in (*(block for blocks in self.blocks for block in blocks), *self.outputs):  # type: ignore[attr-defined]
            yield from projection.slots()


def has_medusa(folder: Path) -> bool:
    """Whether a model's checkpoint brings MEDUSA heads along."""
    return any(name.startswith("medusa_head.") for name in Checkpoint(folder))


def load_medusa(folder: Path, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """MEDUSA heads for a target of this width and vocabulary.

    Raises:
        InputError: it is damaged, or does not fit the target.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder", hint="give the folder of a MEDUSA checkpoint")
    if (folder / "config.json").is_file():
        check_kind(folder, read_config(folder), "medusa")
    checkpoint = Checkpoint(folder, pickled=True)
    found = {name: match for name in checkpoint if (match := _NAME.match(name))}
    if not found:
        raise InputError(f"{folder} holds no MEDUSA heads (medusa_head.0.0.linear.weight)")
    prefix = next(iter(found.values()))[1] or ""
    count = 1 + max(int(match[2]) for match in found.values())
    depth = max((1 + int(match[3]) for match in found.values() if match[4]), default=0)
    if not depth:
        raise InputError(f"{folder}: its MEDUSA heads have no residual block ({prefix}0.0.linear.weight)")
    own = any(not match[4] for match in found.values())
    head = configured(folder, lambda: MedusaHeads(hidden_size, count, depth, vocab_size if own else 0))
    head.target_ids = None if own else read_target_ids(checkpoint, vocab_size)
    ignore = r"(?!medusa_head\.)" if prefix else MAPS
    return fill(head, head.slots, checkpoint, rename=lambda name: prefix + name, ignore=ignore)
