"""Kernels of the decode path: compiled C for the CPU, plain torch for everything else."""

from __future__ import annotations

import functools
import logging

import torch

from foretell.kernels.base import HeadSpec, Kernels, Visibility
from foretell.kernels.fallback import TorchKernels
from foretell.kernels.native import NativeKernels

__all__ = ["HeadSpec", "Kernels", "NativeKernels", "Visibility", "kernels_for", "native_kernels"]

_log = logging.getLogger(__name__)


@functools.cache
def native_kernels() -> NativeKernels | None:
    """The compiled CPU kernels, built on first use; None (and one warning) where they cannot be."""
    from foretell.kernels.build import BuildError

    try:
        return NativeKernels()
    except BuildError as error:
        _log.warning(
            "compiled kernels are not available, torch's are used instead: slower, and equal to plain "
            "decoding up to rounding rather than bit by bit: %s",
            error,
        )
        return None


def kernels_for(device: torch.device, dtype: torch.dtype, dims: tuple[int, ...]) -> Kernels:
    """The fastest kernels for a model whose widths and head sizes are `dims`."""
    fits = all(dim % 8 == 0 for dim in dims)
    if device.type == "cpu" and dtype == torch.float32 and fits:
        return native_kernels() or TorchKernels()
    return TorchKernels()
