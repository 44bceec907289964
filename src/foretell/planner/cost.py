"""What a step costs by the rows it verifies, and how many threads make it fastest: measured at load, kept
per machine and model, refined while running.

Shape suffixes: T rows.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foretell.attention import Segment, pack
from foretell.cache import KVArena
from foretell.models.base import TargetModel
from foretell.paths import cache_dir

_log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 32
_SECONDS = 2.0  # that a measurement may take
_ROUNDS = 25
_HEAD_ROWS, _HEAD_TRIES = 32, 2
_THREAD_ROUNDS = 4
_THREADS = torch.get_num_threads()  # what torch would use on this machine
_OURS = {
    _THREADS
}  # numbers of threads that nobody asked for: torch's setting is the process's, and so is this
_FEWER = 0.85  # of the time of more threads, at which fewer are chosen
_MEMORY = 0.9  # weight of the past in a refined entry, per step


@dataclass
class CostTable:
    """Seconds of a step by rows; in between, linear; beyond the last, by the last slope.

    Attributes:
        seconds: rows -> seconds, as measured.
        scale: how this machine runs now against when it was measured; all entries move with it.
    """

    seconds: dict[int, float]
    scale: float = 1.0
    _own: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._smooth()

    def __call__(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        return self.scale * self._shape(rows)

    def ratio(self, rows: int) -> float:
        """In plain steps of one row."""
        return self._shape(rows) / self._shape(1)

    def alpha(self, rows: int) -> float:
        """Mean cost of one more row, in plain steps, up to so many rows."""
        return (self.ratio(rows) - 1) / (rows - 1)

    def observe(self, rows: int, seconds: float) -> None:
        """One step took so long: moves the scale, and the entries around `rows` a little."""
        expected = self(rows)
        if expected <= 0 or seconds <= 0:
            return
        error = min(4.0, max(0.25, seconds / expected))
        self.scale *= error ** (1 - _MEMORY)
        near = min(self._own, key=lambda known: abs(known - rows))
        if 0.7 < rows / near < 1.5:
            self._own[near] *= (error ** (1 - _MEMORY)) ** 0.5
            self._smooth()

    def _smooth(self) -> None:
        """More rows never cost less; noise in a measurement must not say so."""
        if not self._own:
            self._own = dict(sorted(self.seconds.items()))
        least = 0.0
        for rows, value in self._own.items():
            self._own[rows] = least = max(least, value)
        self._rows = list(self._own)
        self._values = list(self._own.values())

    def _shape(self, rows: int) -> float:
        at = bisect.bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            return self._values[at]
        if len(self._rows) == 1:
            return self._values[0] * rows / self._rows[0]
        at = min(max(at, 1), len(self._rows) - 1)
        (r0, r1), (s0, s1) = self._rows[at - 1 : at + 1], self._values[at - 1 : at + 1]
        return max(s0 + (s1 - s0) * (rows - r0) / (r1 - r0), s0 * 1e-3)


def measure(model: TargetModel, rows: Sequence[int] = ROWS, seconds: float = _SECONDS) -> CostTable:
    """Times steps behind a short context, sizes in turn, until `seconds` are over.

    One row is always timed; sizes whose turn never came (of a model that is slow here) are taken from the
    roofline.
    """
    rows = [count for count in rows if count < model.max_context] or [1]
    arena, context = _prepared(model, max(rows))
    times: dict[int, list[float]] = {count: [] for count in rows}
    end = time.perf_counter() + seconds
    for count in rows * _ROUNDS:
        if times[rows[0]] and time.perf_counter() > end:
            break
        times[count].append(_once(model, arena, context, count))
    # the first round warms up; where it is the only one, it must do
    known = {count: statistics.median(own[1:] or own) for count, own in times.items() if own}
    return CostTable(_roofline(model, known[rows[0]], rows) | known)


def _roofline(model: TargetModel, one: float, rows: Sequence[int]) -> dict[int, float]:
    """Steps as a step of one row predicts them: it reads every weight once, which is the time of any step
    until computing takes longer. Bandwidth and FLOP/s are those of the model's head, its largest matrix."""
    few, many = (min(_head_seconds(model, count) for _ in range(_HEAD_TRIES)) for count in (1, _HEAD_ROWS))
    return {count: one * max(1.0, count * many / _HEAD_ROWS / few) for count in rows}


def _head_seconds(model: TargetModel, rows: int) -> float:
    hidden_RW = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
    start = time.perf_counter()
    float(model.head(hidden_RW)[0, 0])  # waits for the device
    return time.perf_counter() - start


def fastest_threads(model: TargetModel) -> int:
    """How many of torch's threads make a plain step fastest: all, half of them, a quarter ... one.

    Small models are slower on many cores than on few. Leaves torch's setting as it was.
    """
    before = torch.get_num_threads()
    counts = [_THREADS >> shift for shift in range(_THREADS.bit_length())]
    arena, context = _prepared(model, 1)
    times = dict.fromkeys(counts, math.inf)
    try:
        for _ in range(_THREAD_ROUNDS):
            for count in counts:
                torch.set_num_threads(count)
                times[count] = min(times[count], _once(model, arena, context, 1))
    finally:
        torch.set_num_threads(before)
    best = _THREADS
    for count in counts:
        if times[count] < _FEWER * times[best]:
            best = count
    return best


def _prepared(model: TargetModel, rows: int) -> tuple[KVArena, int]:
    """An arena that holds a context, and the context's length, with room for so many rows."""
    context = max(1, min(_CONTEXT, model.max_context - rows - 1))
    arena = model.new_arena(context + rows)
    model.forward(pack([Segment(0, 0, [0] * context)], arena))
    return arena, context


def _once(model: TargetModel, arena: KVArena, context: int, rows: int) -> float:
    segment = Segment(0, context, [0], [0] * (rows - 1), range(-1, rows - 2))
    start = time.perf_counter()
    logits_RV = model.forward(pack([segment], arena)).logits_RV
    float(logits_RV[0, 0])  # waits for the device
    return time.perf_counter() - start


def load_or_measure(model: TargetModel, folder: Path | None) -> CostTable:
    """The table of this machine and model: from the cache, else measured and kept there.

    Sets torch's threads to the number that was fastest, on a CPU and unless OMP_NUM_THREADS or
    `torch.set_num_threads` said how many.
    """
    path = None if folder is None else cache_dir("cost") / f"{_key(model, folder)}.json"
    known = None if path is None else _read(path)
    ours = model.device.type == "cpu" and _asked_threads() is None
    threads = known[0] if known else fastest_threads(model) if ours else torch.get_num_threads()
    if ours and threads != torch.get_num_threads():
        _log.info("%d threads are used: faster than %d here", threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        _OURS.add(threads)
    if known:
        return CostTable(known[1])
    table = measure(model)
    if path is not None:
        _write(path, threads, table.seconds)
    return table


def _asked_threads() -> str | None:
    """How many threads somebody has asked for; None = nobody."""
    now = torch.get_num_threads()
    return os.environ.get("OMP_NUM_THREADS") or (None if now in _OURS else str(now))


def _key(model: TargetModel, folder: Path) -> str:
    """Everything that moves a step's time: machine, threads, device, code, weights."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    parts = (
        platform.node(),
        device,
        os.cpu_count(),
        _asked_threads(),
        torch.__version__,
        model.impl,
        model.weights,
        str(model.dtype),
        str(folder.resolve()),
        (folder / "config.json").stat().st_mtime_ns,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> tuple[int, dict[int, float]] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        threads = int(value["threads"])
        table = {int(rows): float(seconds) for rows, seconds in value["seconds"].items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    good = threads >= 1 and 1 in table and all(0 < s < math.inf for s in table.values())
    return (threads, table) if good else None


def _write(path: Path, threads: int, seconds: Mapping[int, float]) -> None:
    try:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"threads": threads, "seconds": seconds}), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _log.warning("step times are not kept: %s cannot be written: %s", path, error.strerror)
