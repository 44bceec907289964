"""Linear layers whose weights are laid out once for the machine's fastest exact product.

Verification multiplies a few rows by every weight of the model, and this is where speculation is won
or lost on a CPU. Milliseconds of a 3072 x 576 product at 1 / 8 rows, read from memory, on two AVX2
cores: torch's fp32 0.95 / 2.2, oneDNN's prepacked fp32 0.63 / 0.88, our panels 0.42 / 0.50 in fp32 and
0.26 / 0.36 with 16-bit weights (docs/log.md). Panels and oneDNN give each row the same bits for every
number of rows; torch's product does not.

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.kernels import native_kernels
from foretell.kernels.base import PANEL
from foretell.kernels.native import KINDS
from foretell.kernels.whole import Matrix

WEIGHTS = ("stored", "fp32", "fp16", "int8")
_ROWS_HINT = 8  # rows that oneDNN's layout is chosen for


class _Product(Protocol):
    """x [T, I] -> [T, O], with the weight inside."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class _Panels:
    """The compiled kernel; 16-bit weights stay 16-bit in memory and are widened in registers."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        kernels = native_kernels()
        assert kernels is not None
        self._kernels = kernels
        self._outputs = weight_OI.shape[0]
        self.packed = kernels.pack(weight_OI)
        missing = self.packed.shape[0] * self.packed.shape[2] - self._outputs
        self.bias_O = None if bias_O is None else F.pad(bias_O.float(), (0, missing))

    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.dtype != torch.float32:
            raise TypeError(f"this product takes float32 activations, got {x_TI.dtype}")
        out_TO = self._kernels.linear(x_TI.contiguous(), self.packed, self.bias_O)
        return out_TO if out_TO.shape[1] == self._outputs else out_TO[:, : self._outputs].contiguous()


class _Panels8:
    """The compiled 8-bit kernel: weights and activations are rounded in blocks of 64 inputs, each row's
    by its own values."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        kernels = native_kernels()
        assert kernels is not None
        self._kernels = kernels
        self._outputs = weight_OI.shape[0]
        self.packed = kernels.pack8(weight_OI)
        missing = self.packed.shape[0] * PANEL - self._outputs
        self.bias_O = None if bias_O is None else F.pad(bias_O.float(), (0, missing))

    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.dtype != torch.float32:
            raise TypeError(f"this product takes float32 activations, got {x_TI.dtype}")
        out_TO = self._kernels.linear8(x_TI.contiguous(), self.packed, self.bias_O)
        return out_TO if out_TO.shape[1] == self._outputs else out_TO[:, : self._outputs].contiguous()


class _OneDnn:
    """oneDNN's prepacked fp32 product: where the compiled kernels cannot be had."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.float().contiguous(), _ROWS_HINT)
        self._bias_O = None if bias_O is None else bias_O.float()

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")
        return out_TO


class _Plain:
    """torch's own product: CUDA."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)


_PRODUCTS: Mapping[str, Callable[[Tensor, Tensor | None], _Product]] = {
    "panels": _Panels,
    "panels8": _Panels8,
    "onednn": _OneDnn,
    "torch": _Plain,
}


class PackedLinear(nn.Module):
    """y = x @ weight.T + bias; the weight that it was made from may be freed.

    Attributes:
        kernel: "panels", "panels8", "onednn" or "torch".
        row_exact: a row of y is the same bits however many rows x has.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, kernel: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.kernel = kernel
        self.row_exact = kernel != "torch"
        self._product = _PRODUCTS[kernel](weight_OI, bias_O)

    def matrix(self) -> Matrix | None:
        """The packed weight for a pass of compiled code, where it has one."""
        product = self._product
        if not isinstance(product, (_Panels, _Panels8)):
            return None
        kind = KINDS[product.packed.dtype]
        return Matrix(product.packed, product.bias_O, self.in_features, self.out_features, kind)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        rows_TI = x_TI.reshape(-1, self.in_features)
        return self._product(rows_TI).view(*x_TI.shape[:-1], self.out_features)


def matrices(parts: Sequence[nn.Module]) -> list[Matrix] | None:
    """The packed weights of layers for a pass of compiled code; None where one of them has none."""
    found = [part.matrix() if isinstance(part, PackedLinear) else None for part in parts]
    whole = [matrix for matrix in found if matrix is not None]
    return whole if len(whole) == len(found) else None


def choose_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The product for activations of this device and dtype."""
    if device.type != "cpu" or dtype != torch.float32:
        return "torch"
    if native_kernels() is not None:
        return "panels"
    return "onednn" if torch.backends.mkldnn.is_available() else "torch"


def pack(
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    weights: str = "stored",
) -> PackedLinear:
    """The linear layer of a weight, for activations of `dtype` on the weight's device.

    Args:
        weights: "stored" keeps 16 bits where the kernel can widen them, with the same results bit for bit
            as "fp32"; "fp16" and "int8" round (CPU with the compiled kernels only).

    Raises:
        InputError: these weights cannot be had here.
    """
    check_weights(weights, weight_OI.device, dtype)
    if weights == "int8":
        return PackedLinear(weight_OI, bias_O, "panels8")
    if weights in ("fp32", "fp16"):
        weight_OI = weight_OI.to(torch.float32 if weights == "fp32" else torch.float16)
    kernel = choose_kernel(weight_OI.device, dtype)
    if kernel == "torch":
        weight_OI, bias_O = weight_OI.to(dtype), None if bias_O is None else bias_O.to(dtype)
    return PackedLinear(weight_OI, bias_O, kernel)


def check_weights(weights: str, device: torch.device, dtype: torch.dtype) -> None:
    """Whether matrices can be kept so on this device.

    Raises:
        InputError: they cannot, or there is no such form.
    """
    if weights not in WEIGHTS:
        raise InputError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights != "stored" and (device.type != "cpu" or dtype != torch.float32):
        raise InputError(f"weights {weights} are for the CPU; on {device.type} they are kept in {dtype}")
    if weights == "int8" and native_kernels() is None:
        raise InputError(
            "weights int8 need the compiled kernels", hint="install a C compiler, or foretell[compiler]"
        )
