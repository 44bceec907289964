"""The compiled CPU kernels (native/*.c) behind the interface of base.py, through ctypes.

Shape suffixes: R queries, N keys of one request, T, H, K, D, S and others as in base.py.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretell.errors import InputError
from foretell.kernels import build
from foretell.kernels.base import BLOCK8, MAX_CHUNK, PANEL, HeadSpec, Visibility

_log = logging.getLogger(__name__)

_PTR, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# enum of native/linear.c; bytes are 8-bit panels (native/pass.c)
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
_ROWS_AT_ONCE = 128  # rows of a product whose inputs stay in the cache
_PARALLEL_WORK = 1 << 15  # multiply-adds of an attention below which one thread is faster


class _AttendArgs(ctypes.Structure):
    """attend_t of native/attend.c; the order of the fields is the contract."""

    _fields_ = (
        *((name, _PTR) for name in ("q", "k_new", "v_new", "out", "k", "v")),
        *((name, _INT) for name in ("q_stride", "kv_stride", "head_stride")),
        *((name, _INT) for name in ("rows", "heads", "kv_heads", "dim")),
        *((name, _PTR) for name in ("slot", "base", "lo", "hi", "extra_start", "extra")),
        *((name, _PTR) for name in ("order_at", "order")),
        *((name, _PTR) for name in ("task_row", "task_kv", "task_first", "task_count")),
        *((name, _INT) for name in ("tasks", "chunk")),
        ("sinks", _PTR),
        *((name, _FLOAT) for name in ("scale", "softcap")),
        ("lse", _PTR),
    )


class _MassArgs(ctypes.Structure):
    """mass_t of native/mass.c."""

    _fields_ = (
        *((name, _PTR) for name in ("q", "k", "out", "score", "top", "sum")),
        *((name, _INT) for name in ("q_stride", "head_stride")),
        *((name, _INT) for name in ("rows", "chosen", "group", "keys", "dim")),
        *((name, _PTR) for name in ("heads", "last")),
        ("window", _INT),
        ("sinks", _PTR),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


def _loaded_gomp_parallel() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, so that both use one thread pool."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    paths = {line.split()[-1] for line in maps.splitlines() if "omp" in line.rpartition("/")[2]}
    for path in sorted(paths, key=lambda p: "torch" not in p):
        if path.startswith("/"):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p)
    return None


def _tasks(seen: Visibility, spec: HeadSpec, threads: int) -> Tensor:
    """Row-heads cut into tasks: [4, tasks] of first row of the segment, kv head, first, count.

    How they are cut changes no bit of the result; it only spreads the work.
    """
    group = spec.heads // spec.kv_heads
    total = sum(rows for _, rows in seen.segments) * spec.heads
    chunk = max(1, min(MAX_CHUNK, -(-total // (2 * threads))))
    columns = [
        (row, kv, first, min(chunk, rows * group - first))
        for row, rows in seen.segments
        for kv in range(spec.kv_heads)
        for first in range(0, rows * group, chunk)
    ]
    flat = [value for part in zip(*columns, strict=True) for value in part]
    return torch.tensor(flat, dtype=torch.int64).view(4, -1)


class NativeKernels:
    """See `foretell.kernels.base.Kernels`. fp32 on the CPU; widths and head sizes divisible by 8.

    Raises:
        build.BuildError: no compiler, or it failed.
    """

    name = "native"
    row_exact = True

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL(str(build.library()))
        except OSError as error:
            raise build.BuildError(f"the compiled kernels cannot be loaded: {error}") from error
        self._lib.ft_keyed_argmax.restype = ctypes.c_int64
        self._lib.ft_top.restype = _FLOAT
        parallel = _loaded_gomp_parallel()
        if parallel is None:
            _log.warning("torch's OpenMP runtime was not found: the compiled kernels run on one thread")
        self._lib.ft_init(parallel)
        self._given: dict[int, int] = {}

    def add_norm(self, residual_TW: Tensor, delta_TW: Tensor | None, weight_W: Tensor, eps: float) -> Tensor:
        out_TW = torch.empty_like(residual_TW)
        rows, width = residual_TW.shape
        delta = None if delta_TW is None else _PTR(delta_TW.data_ptr())
        self._lib.ft_add_norm(
            _PTR(residual_TW.data_ptr()),
            delta,
            _PTR(weight_W.data_ptr()),
            _PTR(out_TW.data_ptr()),
            _INT(rows),
            _INT(width),
            _FLOAT(eps),
            torch.get_num_threads(),
        )
        return out_TW

    def rope(
        self,
        qkv_TF: Tensor,
        table: tuple[Tensor, Tensor],
        position_T: Tensor,
        spec: HeadSpec,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        q_norm, k_norm = (None, None) if norms is None else (_PTR(n.data_ptr()) for n in norms)
        self._lib.ft_rope(
            _PTR(qkv_TF.data_ptr()),
            _PTR(table[0].data_ptr()),
            _PTR(table[1].data_ptr()),
            q_norm,
            k_norm,
            _PTR(position_T.data_ptr()),
            _INT(qkv_TF.shape[0]),
            _INT(spec.heads),
            _INT(spec.kv_heads),
            _INT(spec.dim),
            _INT(qkv_TF.stride(0)),
            _FLOAT(eps),
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up_TW: Tensor) -> Tensor:
        rows, width = gate_up_TW.shape[0], gate_up_TW.shape[1] // 2
        out_TW = gate_up_TW.new_empty(rows, width)
        self._lib.ft_silu_mul(
            _PTR(gate_up_TW.data_ptr()),
            _PTR(out_TW.data_ptr()),
            _INT(rows),
            _INT(width),
            torch.get_num_threads(),
        )
        return out_TW

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache_KSD: tuple[Tensor, Tensor],
        seen: Visibility,
        spec: HeadSpec,
    ) -> Tensor:
        out_TW = q_THD.new_empty(q_THD.shape[0], spec.heads * spec.dim)
        self._attend(q_THD, (k_TKD, v_TKD), cache_KSD, seen, spec, out_TW, None)
        return out_TW

    def partial(
        self, q_THD: Tensor, cache_KSD: tuple[Tensor, Tensor], seen: Visibility, spec: HeadSpec
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.partial`."""
        out_THD = torch.empty(q_THD.shape, dtype=torch.float32)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32)
        self._attend(q_THD, None, cache_KSD, seen, spec, out_THD, lse_TH)
        return out_THD, lse_TH

    def _attend(
        self,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        cache_KSD: tuple[Tensor, Tensor],
        seen: Visibility,
        spec: HeadSpec,
        out: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        threads = torch.get_num_threads()
        tasks = self.tasks(seen, spec, threads)
        keys_KSD, values_KSD = cache_KSD
        k_new, v_new = (None, None) if new is None else (t.data_ptr() for t in new)
        sinks = None if spec.sinks_H is None else spec.sinks_H.data_ptr()
        args = _AttendArgs(
            *(q_THD.data_ptr(), k_new, v_new, out.data_ptr(), keys_KSD.data_ptr(), values_KSD.data_ptr()),
            *(q_THD.stride(0), 0 if new is None else new[0].stride(0), keys_KSD.stride(0)),
            *(q_THD.shape[0], spec.heads, spec.kv_heads, spec.dim),
            *(t.data_ptr() for t in seen.arrays),
            *(t.data_ptr() for t in tasks),
            *(tasks.shape[1], MAX_CHUNK),
            sinks,
            *(spec.scale, spec.softcap),
            None if lse_TH is None else lse_TH.data_ptr(),
        )
        self._lib.ft_attend(ctypes.byref(args), threads if self.worth_threads(seen, spec) else 1)

    def add_mass(
        self,
        out_N: Tensor,
        q_RHD: Tensor,
        keys_KND: Tensor,
        spec: HeadSpec,
        heads: Sequence[int],
        last_R: Sequence[int],
    ) -> None:
        """Adds to `out_N` what each row pays to each key, averaged over `heads` (ascending): row after row,
        so that the sum is the same bits however rows are cut into calls.

        Args:
            q_RHD, keys_KND: heads one behind another, as in a pass and in the arena.
            last_R: the last key that each row sees.
        """
        chosen, last = (torch.tensor(list(values), dtype=torch.int64) for values in (heads, last_R))
        args = _MassArgs(
            *(t.data_ptr() for t in (q_RHD, keys_KND, out_N)),
            *(None, None, None),
            *(q_RHD.stride(0), keys_KND.stride(0)),
            *(len(q_RHD), len(heads), spec.heads // spec.kv_heads, keys_KND.shape[1], spec.dim),
            *(chosen.data_ptr(), last.data_ptr()),
            spec.window or 0,
            None if spec.sinks_H is None else spec.sinks_H.data_ptr(),
            *(spec.scale, spec.softcap),
        )
        self._lib.ft_mass(ctypes.byref(args), torch.get_num_threads())

    def mark_best(self, score_N: Tensor, kept_N: Tensor, count: int) -> None:
        """Sets `count` more entries of the bool mask, those of highest score, the first ones where scores are
        equal. At least so many are unset."""
        score_N = score_N.float().contiguous()
        room = torch.empty(2, len(score_N), dtype=torch.int32)
        self._lib.ft_mark_best(
            *(_PTR(t.data_ptr()) for t in (score_N, kept_N, room[0], room[1])),
            *(_INT(len(score_N)), _INT(count)),
        )

    def top(self, score_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` highest of at least as many scores, the highest first, lower ids first where scores are
        equal: their logarithms after a softmax over all, and their ids. At least one score is finite."""
        score_V = score_V.float().contiguous()
        value_N, id_N = torch.empty(count), torch.empty(count, dtype=torch.int64)
        log_sum = self._lib.ft_top(
            *(_PTR(score_V.data_ptr()), _INT(len(score_V)), _INT(count)),
            *(_PTR(id_N.data_ptr()), _PTR(value_N.data_ptr())),
        )
        return value_N - log_sum, id_N

    @staticmethod
    def tasks(seen: Visibility, spec: HeadSpec, threads: int) -> Tensor:
        """How attention is cut into tasks, [4, tasks]; all layers of a pass share it."""
        key = ("tasks", spec.heads, spec.kv_heads, threads)
        return seen.cached(key, lambda: _tasks(seen, spec, threads))

    @staticmethod
    def worth_threads(seen: Visibility, spec: HeadSpec) -> bool:
        """Whether attention is work enough for more than one thread."""
        return seen.keys_read * spec.heads * spec.dim >= _PARALLEL_WORK

    def given_threads(self, threads: int) -> int:
        """How many threads the OpenMP runtime really gives when asked for so many."""
        if threads not in self._given:
            self._given[threads] = int(self._lib.ft_given_threads(threads))
        return self._given[threads]

    def run_pass(self, arguments: ctypes.Structure, threads: int) -> None:
        """native/pass.c; see `foretell.kernels.whole.WholePass`."""
        self._lib.ft_pass(ctypes.byref(arguments), threads)

    def linear(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ weight.T + bias for a weight of `pack`, [T, O]."""
        panels, inputs, width = packed.shape
        out_TO = x_TI.new_empty(x_TI.shape[0], panels * width)
        bias = None if bias_O is None else _PTR(bias_O.data_ptr())
        for start in range(0, x_TI.shape[0], _ROWS_AT_ONCE):
            part_TI = x_TI[start : start + _ROWS_AT_ONCE]
            self._lib.ft_linear(
                _PTR(part_TI.data_ptr()),
                _PTR(packed.data_ptr()),
                bias,
                _PTR(out_TO[start:].data_ptr()),
                _INT(part_TI.shape[0]),
                _INT(inputs),
                _INT(panels),
                KINDS[packed.dtype],
                torch.get_num_threads(),
            )
        return out_TO

    def linear8(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        """As `linear`, for a weight of `pack8`; activations are rounded to 8 bits per row and block."""
        panels, blocks, _ = packed.shape
        rows, inputs = x_TI.shape
        out_TO = x_TI.new_empty(rows, panels * PANEL)
        bias = None if bias_O is None else _PTR(bias_O.data_ptr())
        room = min(rows, _ROWS_AT_ONCE) * blocks
        rounded, scale = torch.empty(room * BLOCK8, dtype=torch.int16), torch.empty(room)
        for start in range(0, rows, _ROWS_AT_ONCE):
            part_TI = x_TI[start : start + _ROWS_AT_ONCE]
            self._lib.ft_linear8(
                _PTR(part_TI.data_ptr()),
                _PTR(packed.data_ptr()),
                bias,
                _PTR(out_TO[start:].data_ptr()),
                _PTR(rounded.data_ptr()),
                _PTR(scale.data_ptr()),
                _INT(part_TI.shape[0]),
                _INT(inputs),
                _INT(panels),
                torch.get_num_threads(),
            )
        return out_TO

    def pack8(self, weight_OI: Tensor) -> Tensor:
        """8-bit panels, uint8 [O / 16, blocks of 64 inputs, bytes]: per block 16 fp32 scales, then pairs of
        inputs for every output. Rounded to nearest, symmetric; padded with zeros.

        Raises:
            InputError: a value is not finite.
        """
        weight_OI = weight_OI.float()
        if not bool(torch.isfinite(weight_OI).all()):
            raise InputError("a weight holds values that are not finite: it cannot be rounded to 8 bits")
        outputs, inputs = weight_OI.shape
        weight_OI = torch.nn.functional.pad(weight_OI, (0, -inputs % BLOCK8, 0, -outputs % PANEL))
        # panel, output, block, pair, which of the two
        blocks = weight_OI.view(-1, PANEL, weight_OI.shape[1] // BLOCK8, BLOCK8 // 2, 2)
        scale = blocks.abs().amax((3, 4)) / 127
        whole = (blocks / scale.clamp(min=1e-38)[..., None, None]).round().clamp(-127, 127)
        ints = whole.to(torch.int8).permute(0, 2, 3, 1, 4).flatten(2).contiguous().view(torch.uint8)
        scales = scale.permute(0, 2, 1).contiguous().view(torch.uint8)
        return torch.cat([scales, ints], 2).contiguous()

    def pack(self, weight_OI: Tensor) -> Tensor:
        """Panels of 16 outputs, [O / 16, I, 16], in fp32, fp16 or bf16 as the weight is; outputs are
        padded with zeros. fp16 becomes fp32 on machines that cannot widen it quickly."""
        if weight_OI.dtype == torch.float16 and not self._lib.ft_has_fp16():
            weight_OI = weight_OI.float()
        missing = -weight_OI.shape[0] % PANEL
        if missing:
            weight_OI = torch.nn.functional.pad(weight_OI, (0, 0, 0, missing))
        panels: Tensor = weight_OI.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
        return panels

    def keyed_argmax(self, scores_V: Tensor, key: int) -> int:
        """argmax of scores + Gumbel noise of `foretell.noise.gumbel(key, id)`; -inf never wins."""
        scores_V = scores_V.float().contiguous()
        return int(
            self._lib.ft_keyed_argmax(_PTR(scores_V.data_ptr()), _INT(len(scores_V)), ctypes.c_uint64(key))
        )
