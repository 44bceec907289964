"""What ring attention costs on this machine, over processes that exchange over gloo: balance of layouts,
bytes against the formula, transfers against computing.

Shape suffixes: T rows, H query heads, K key/value heads, N keys, D head size.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.attention import Segment, pack
from foretell.cache import KVArena
from foretell.errors import RankError
from foretell.kernels import HeadSpec, kernels_for
from foretell.parallel.group import Group, Pending
from foretell.parallel.layout import LAYOUTS, Placement
from foretell.parallel.merge import Partial
from foretell.parallel.ring import VARIANTS, Attention, Sharing
from foretell.parallel.simulate import Span
from foretell.parallel.team import TIMEOUT
from foretell.parallel.visible import Range

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    """One layer and a causal prompt over ranks."""

    ranks: int
    shard: int
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64

    @property
    def spec(self) -> HeadSpec:
        """Of the layer."""
        return HeadSpec(self.heads, self.kv_heads, self.dim, self.dim**-0.5)

    @property
    def formula_bytes(self) -> float:
        """What a rank sends: 2 S Hkv d e (N - 1) / N."""
        return 2 * self.shard * self.kv_heads * self.dim * 4 * (self.ranks - 1)


def sharing(ranks: int, length: int, layout: str) -> Sharing:
    """A prompt of so many tokens, each row where its keys are."""
    arena = KVArena(1, 1, 8, 1, torch.float32, _CPU)
    seen = pack([Segment(0, 0, [0] * length)], arena).seen(None)
    placement = Placement(ranks, layout, length)
    rows = [placement.held(rank, length) for rank in range(ranks)]
    return Sharing(seen, rows, [[Range(placement, 0, 0)]] * ranks, list(map(len, rows)))


def balance(ranks: int, shard: int) -> dict[str, dict[str, float]]:
    """Score cells of a head by layout, against the mean of ranks: those of the fullest rank, and the sum over
    steps of the fullest rank's, which is how long the ring takes; and the largest difference in a step."""
    found = {}
    for layout in LAYOUTS:
        shared = sharing(ranks, ranks * shard, layout)
        cells = [[shared.cells(r, (r - step) % ranks) for step in range(ranks)] for r in range(ranks)]
        mean = sum(map(sum, cells)) / ranks
        per_step = [[own[step] for own in cells] for step in range(ranks)]
        found[layout] = {
            "most_to_mean": max(map(sum, cells)) / mean,
            "wall_to_mean": sum(map(max, per_step)) / mean,
            "spread_per_step": max(max(own) - min(own) for own in per_step),
        }
    return found


class _Watched(Pending):
    """Notes when an exchange is complete, whoever waits for it and when."""

    def __init__(self, pending: Pending, done: Callable[[], None]) -> None:
        super().__init__([], [])
        self._thread = threading.Thread(target=self._watch, args=(pending, done))
        self._thread.start()

    def wait(self) -> None:
        """Until it is complete."""
        self._thread.join()

    @staticmethod
    def _watch(pending: Pending, done: Callable[[], None]) -> None:
        pending.wait()
        done()


@dataclass
class _Clock:
    """Spans of one rank, from a common start."""

    rank: int
    start: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list)

    def note(self, kind: str, begin: float) -> None:
        """Something of this kind has ended."""
        step = sum(span.kind == kind for span in self.spans)
        self.spans.append(Span(self.rank, step, kind, begin - self.start, time.perf_counter() - self.start))


@dataclass
class _TracedGroup(Group):
    """A group whose transfers are noted."""

    clock: _Clock | None = None

    def exchange(self, purpose: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """See `Group.exchange`."""
        pending, clock, begin = super().exchange(purpose, sends, receives), self.clock, time.perf_counter()
        return pending if clock is None else _Watched(pending, lambda: clock.note("transfer", begin))


class _TracedAttention(Attention):
    """Attention whose computing is noted."""

    def partial(
        self, q_THD: Tensor, block: tuple[Tensor, Tensor] | Tensor, rows_of: int, keys_of: int
    ) -> Partial | None:
        """See `Attention.partial`."""
        begin, found = time.perf_counter(), super().partial(q_THD, block, rows_of, keys_of)
        if isinstance(self.group, _TracedGroup) and self.group.clock is not None:
            self.group.clock.note("compute", begin)
        return found


def _alone(attention: Attention, q_THD: Tensor, block_2KND: Tensor) -> None:
    """The computing of a ring without its transfers; blocks are of one size."""
    for owner in range(attention.group.size):
        attention.partial(q_THD, block_2KND, attention.group.rank, owner)


def _serial(attention: Attention, q_THD: Tensor, block_2KND: Tensor) -> None:
    """A ring that computes only when nothing is on its way."""
    group = attention.group
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size):
        attention.partial(q_THD, block_2KND, group.rank, (group.rank - step) % group.size)
        if step < group.size - 1:
            arriving = torch.empty_like(block_2KND)
            group.exchange("serial", {after: block_2KND}, {before: arriving}).wait()
            block_2KND = arriving


def measure_rank(rank: int, setting: Setting, layout: str, repeats: int, folder: str) -> None:
    """One rank's part of `measure`: ranks meet in the folder, and leave their results in it."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=setting.ranks, timeout=limit)
    group = _TracedGroup(rank, setting.ranks)
    shared = sharing(setting.ranks, setting.ranks * setting.shard, layout)
    kernels = kernels_for(_CPU, torch.float32, (setting.dim,))
    attention = _TracedAttention(shared, group, kernels, setting.spec)
    generator = torch.Generator().manual_seed(rank)
    q_THD = torch.randn(setting.shard, setting.heads, setting.dim, generator=generator)
    block = torch.randn(2, setting.kv_heads, setting.shard, setting.dim, generator=generator)
    runs: dict[str, Callable[..., object]] = {"compute alone": _alone, "serial": _serial, **VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, int] = {}
    for name, run in list(runs.items()) * (repeats + 1):
        group.sent.clear()
        dist.barrier()
        begin = time.perf_counter()
        run(attention, q_THD, block)
        dist.barrier()
        times[name].append(time.perf_counter() - begin)
        sent[name] = sum(group.sent.values())
    dist.barrier()
    group.clock = _Clock(rank)
    VARIANTS["pass-kv"](attention, q_THD, block)
    seconds = {name: statistics.median(own[1:]) for name, own in times.items()}
    torch.save((seconds, sent, group.clock.spans), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def measure(setting: Setting, layout: str, repeats: int) -> tuple[dict[str, Any], list[Span]]:
    """Median seconds of the slowest rank by way, bytes that a rank sent, and one ring's timeline."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        args = setting, layout, repeats, folder
        processes = [context.Process(target=measure_rank, args=(r, *args)) for r in range(setting.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            raise RankError(f"rank {failed[0]} ended with code {processes[failed[0]].exitcode}")
        return collect(setting, folder)


def collect(setting: Setting, folder: str) -> tuple[dict[str, Any], list[Span]]:
    """What `measure_rank` left in the folder; see `measure`."""
    found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(setting.ranks)]
    seconds = {name: max(own[0][name] for own in found) for name in found[0][0]}
    sent = {name: max(own[1][name] for own in found) for name in VARIANTS}
    return {
        "ms": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "overlap": round(seconds["pass-kv"] / seconds["compute alone"], 4),
        "sent_bytes": sent,
        "formula_bytes": setting.formula_bytes,
    }, [span for own in found for span in own[2]]
