"""A decoder's layers, or the one layer of a draft head, as one call of compiled code (native/pass.c).

The same operations as the loop in `foretell.models.decoder`, hence the same bits; but the threads are woken
once per pass instead of five times per layer, and Python is not come back to in between.

Shape suffixes: T packed rows, W hidden width, I width of what attention reads, K key/value heads, S arena
slots, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.kernels.base import BLOCK8, MAX_CHUNK, PANEL, HeadSpec, Visibility
from foretell.kernels.native import NativeKernels

_PTR, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_AT_ONCE = 128  # rows of a product: native/pass.c
_JOBS_PER_LAYER = 9  # parallel_for calls of a layer beside those of its products
_JOBS_PER_PRODUCT = 2


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed weight: `kind` is its number in native/pass.c."""

    packed: Tensor
    bias_O: Tensor | None
    inputs: int
    outputs: int
    kind: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer computes with. Without `attn_norm_W` its attention reads what the caller gives."""

    attn_norm_W: Tensor | None
    mlp_norm_W: Tensor
    qk_norms: tuple[Tensor, Tensor] | None
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    spec: HeadSpec


class _Matrix(ctypes.Structure):
    _fields_ = (("w", _PTR), ("bias", _PTR), ("inputs", _INT), ("panels", _INT), ("kind", _INT))


class _Seen(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("slot", "base", "lo", "hi", "extra_start", "extra")),
        *((name, _PTR) for name in ("order_at", "order")),
        *((name, _PTR) for name in ("task_row", "task_kv", "task_first", "task_count")),
        *((name, _INT) for name in ("tasks", "chunk", "parallel")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("seen", _INT),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("layers", "seen", "norm", "input", "cos", "sin", "position")),
        *((name, _PTR) for name in ("x", "h", "qkv", "mixed", "delta", "gate_up", "act", "scale8")),
        *((name, _PTR) for name in ("q8", "next", "keys", "values", "aux", "queries")),
        *((name, _INT) for name in ("count", "rows", "width", "inner")),
        *((name, _INT) for name in ("heads", "kv_heads", "dim", "head_stride", "layer_stride")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    )


class WholePass:
    """The layers of a decoder. What it keeps does not change, so threads may share it.

    Args:
        layers: in order; all of one shape, but for their windows.
        norm_W: the final norm's weight; None = there is none.
    """

    def __init__(
        self, kernels: NativeKernels, layers: Sequence[LayerSpec], norm_W: Tensor | None, eps: float
    ) -> None:
        self._kernels, self._specs, self._norm_W, self._eps = kernels, list(layers), norm_W, eps
        self._windows = list(dict.fromkeys(layer.spec.window for layer in layers))
        self._table = (_Layer * len(layers))()
        for entry, layer in zip(self._table, layers, strict=True):
            _fill(entry, layer, self._windows.index(layer.spec.window))
        products = (layers[0].qkv, layers[0].out, layers[0].gate_up, layers[0].down)
        self._widest_input = max(matrix.inputs for matrix in products)

    @staticmethod
    def fits(layers: Sequence[LayerSpec]) -> bool:
        """Whether compiled code can run these layers: whole panels, and plain scores."""
        whole = all(
            m.outputs % PANEL == 0
            for layer in layers
            for m in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        plain = all(not layer.spec.softcap and layer.spec.sinks_H is None for layer in layers)
        return bool(layers) and whole and plain

    def __call__(
        self,
        x_TW: Tensor,
        table: tuple[Tensor, Tensor],
        position_T: Tensor,
        cache: tuple[Tensor, Tensor],
        seen: Mapping[int | None, Visibility],
        aux_TW: Mapping[int, Tensor],
        queries_THD: Mapping[int, Tensor],
        input_TI: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers on `x_TW` in place; returns its final norm, or itself where there is none, [T, W].

        Args:
            table, position_T: rotary angles and each row's position.
            cache: K and V of all layers, [L, K, S, D].
            seen: what rows see, per window.
            aux_TW: per layer index, where the stream that enters it is written.
            queries_THD: per layer index, where its rotated queries are written.
            input_TI: what attention reads in a layer without a norm of its own; by default the stream.
        """
        rows, width = x_TW.shape
        first, input_TI = self._specs[0], x_TW if input_TI is None else input_TI
        threads = self._kernels.given_threads(torch.get_num_threads())
        aux, queries = (self._places(wanted) for wanted in (aux_TW, queries_THD))
        views = (_Seen * len(self._windows))()
        kept = [
            _see(view, seen[w], first.spec, threads) for view, w in zip(views, self._windows, strict=True)
        ]
        h_TW = torch.empty_like(x_TW)
        sizes = [m.outputs for m in (first.qkv, first.out, first.gate_up)]
        mixed, act = first.spec.heads * first.spec.dim, first.down.inputs
        work = [torch.empty(rows * size) for size in (sizes[0], mixed, sizes[1], sizes[2], act)]
        blocks = min(rows, _AT_ONCE) * -(-self._widest_input // BLOCK8)
        scale8, q8 = torch.empty(blocks), torch.empty(blocks * BLOCK8, dtype=torch.int16)
        parts = -(-rows // _AT_ONCE)
        jobs = len(self._specs) * (_JOBS_PER_LAYER + 4 * _JOBS_PER_PRODUCT * parts) + 1
        counters = torch.zeros(jobs, dtype=torch.int64)
        arrays = (*table, position_T, x_TW, h_TW, *work, scale8, q8, counters, *cache)
        self._kernels.run_pass(
            _Pass(
                ctypes.addressof(self._table),
                ctypes.addressof(views),
                *(None if self._norm_W is None else self._norm_W.data_ptr(), input_TI.data_ptr()),
                *(t.data_ptr() for t in arrays),
                ctypes.addressof(aux),
                ctypes.addressof(queries),
                *(len(self._specs), rows, width, act),
                *(first.spec.heads, first.spec.kv_heads, first.spec.dim),
                *(cache[0].stride(1), cache[0].stride(0)),
                *(self._eps, first.spec.scale),
            ),
            threads,
        )
        del kept  # the tasks' arrays had to live until here
        return x_TW if self._norm_W is None else h_TW

    def _places(self, wanted: Mapping[int, Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        """Per layer the address of what is wanted of it, or null."""
        places = (_PTR * len(self._specs))()
        for index, tensor in wanted.items():
            places[index] = tensor.data_ptr()
        return places


def _fill(entry: _Layer, layer: LayerSpec, seen: int) -> None:
    entry.attn_norm = None if layer.attn_norm_W is None else layer.attn_norm_W.data_ptr()
    entry.mlp_norm = layer.mlp_norm_W.data_ptr()
    if layer.qk_norms is not None:
        entry.q_norm, entry.k_norm = (norm.data_ptr() for norm in layer.qk_norms)
    entry.seen = seen
    for name in ("qkv", "out", "gate_up", "down"):
        matrix: Matrix = getattr(layer, name)
        bias = None if matrix.bias_O is None else matrix.bias_O.data_ptr()
        setattr(
            entry,
            name,
            _Matrix(matrix.packed.data_ptr(), bias, matrix.inputs, matrix.outputs // PANEL, matrix.kind),
        )


def _see(view: _Seen, seen: Visibility, spec: HeadSpec, threads: int) -> Tensor:
    """Fills a view; returns the tasks, which must outlive the pass."""
    tasks = NativeKernels.tasks(seen, spec, threads)
    names = ("slot", "base", "lo", "hi", "extra_start", "extra", "order_at", "order")
    for name, array in zip(names, seen.arrays, strict=True):
        setattr(view, name, array.data_ptr())
    for name, array in zip(("task_row", "task_kv", "task_first", "task_count"), tasks, strict=True):
        setattr(view, name, array.data_ptr())
    view.tasks, view.chunk = tasks.shape[1], MAX_CHUNK
    view.parallel = NativeKernels.worth_threads(seen, spec)
    return tasks
