"""A head made ready to run: weights and norms laid out for the machine, and its layer as one call of compiled
code where that can run it.

Shape suffixes: X any leading dimensions, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.layers import Attention, Block, GatedMlp, RmsNorm
from foretell.kernels import HeadSpec, Kernels, NativeKernels, kernels_for
from foretell.kernels.whole import LayerSpec, WholePass
from foretell.models.linear import WEIGHTS, choose_kernel, matrices, pack

FORMS = ("auto", *WEIGHTS)


class ReadyNorm(nn.Module):
    """An `RmsNorm` by compiled code: for few rows torch's takes several times as long."""

    def __init__(self, norm: RmsNorm, kernels: NativeKernels) -> None:
        super().__init__()
        self.scale_W, self.eps, self._kernels = norm.scales().float().contiguous(), norm.eps, kernels

    def forward(self, x_XW: Tensor) -> Tensor:
        """Over the last dimension."""
        rows_TW = x_XW.reshape(-1, x_XW.shape[-1]).contiguous()
        return self._kernels.add_norm(rows_TW, None, self.scale_W, self.eps).view(x_XW.shape)


def check_form(weights: str) -> None:
    """Whether there are such weights of a head.

    Raises:
        InputError: there are not.
    """
    if weights not in FORMS:
        raise InputError(f"weights of a head must be one of {', '.join(FORMS)}, got {weights!r}")


def form_for(weights: str, device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" is on this device: 8 bits where compiled code runs them. The others are what they are."""
    if weights != "auto":
        return weights
    return "int8" if choose_kernel(device, dtype) == "panels" else "stored"


def make_ready(head: nn.Module, device: torch.device, dtype: torch.dtype, weights: str) -> None:
    """Turns a head into one for inference: weights laid out for the machine, everything else in `dtype`.

    Args:
        weights: how matrices are kept; see `foretell.models.linear.pack`.

    Raises:
        InputError: they cannot be kept so here.
    """
    head.requires_grad_(False)
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                bias_O = None if child.bias is None else child.bias.data.to(device)
                setattr(module, name, pack(child.weight.data.to(device), bias_O, dtype, weights))
            elif isinstance(child, RmsNorm):
                kernels = kernels_for(device, dtype, (len(child.weight),))
                if isinstance(kernels, NativeKernels):
                    setattr(module, name, ReadyNorm(child, kernels))
    head.to(device=device)
    for parameter in head.parameters():
        if parameter.is_floating_point() and parameter.ndim == 1:
            parameter.data = parameter.data.to(dtype)
    head.eval()


def block_pass(block: Block, spec: HeadSpec, kernels: Kernels) -> WholePass | None:
    """The layer of a ready head as one call, where compiled code can run it. The stream is not normed behind
    it."""
    attention, mlp = block.attention, block.mlp
    if not isinstance(kernels, NativeKernels):
        return None
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMlp) or not attention.plain:
        return None
    products = matrices((attention.qkv, attention.out, mlp.gate_up, mlp.down))
    entry = [] if block.input_norm is None else [block.input_norm]
    norms = [*entry, block.post_norm, *attention.norms]
    scales = [norm.scale_W for norm in norms if isinstance(norm, ReadyNorm)]
    if products is None or len(scales) < len(norms):
        return None
    entry_W = scales.pop(0) if entry else None
    post_W, *qk = scales
    qkv, out, gate_up, down = products
    layer = LayerSpec(entry_W, post_W, (qk[0], qk[1]) if qk else None, qkv, out, gate_up, down, spec)
    return WholePass(kernels, [layer], None, block.post_norm.eps) if WholePass.fits([layer]) else None
