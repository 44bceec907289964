"""The arithmetic in which the frozen target reads its answers: fp32, or bf16 where the machine has it.

What is trained stays in fp32: its products have few rows, and without AMX conversions take what
bf16 saves there (docs/log.md).
"""

from __future__ import annotations

import torch

from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.load import LoadedModel, load_model

PRECISIONS = ("auto", "fp32", "bf16")


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """The type of the target's products.

    Args:
        name: one of `PRECISIONS`; "auto" is bf16 where the device multiplies it faster than fp32.

    Raises:
        InputError: there is no such precision, or torch has no bf16 products here.
    """
    if name not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    if device.type == "cuda":
        fast = can = torch.cuda.is_bf16_supported()
    else:
        can = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        fast = can and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if name == "bf16" and not can:
        raise InputError(f"precision bf16 is not to be had on this {device.type}", hint="use fp32")
    return torch.bfloat16 if name == "bf16" or (name == "auto" and fast) else torch.float32


def reader(loaded: LoadedModel, dtype: torch.dtype) -> TargetModel:
    """The target that reads the answers: a copy in `dtype` where that is faster and its weights are not
    rounded to fewer bits than that, else the target itself."""
    target = loaded.model
    if dtype == target.dtype or dtype == torch.float32 or target.weights not in ("stored", "fp32"):
        return target
    return load_model(loaded.name, device=str(target.device), impl=target.impl, dtype=dtype).model
