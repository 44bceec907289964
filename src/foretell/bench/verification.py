"""Whole verification steps behind long histories: over a selection, over all keys, and plain decoding's step.

A real model runs over random keys and values, so no prompt has to be read. Where the memory for all of its
layers' keys is not there, all layers share the memory of one: a pass reads as many bytes from memory while
one layer of all requests is much larger than the processor's cache.

Shape suffixes: N positions, R rows of one request, H query heads, D head size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretell.attention import Segment, pack
from foretell.cache import KVArena, Lease
from foretell.models.base import ForwardOutput
from foretell.models.config import DecoderConfig
from foretell.models.decoder import Decoder
from foretell.planner.arithmetic import Machine
from foretell.sparse import POLICIES, KVReader, Policy, add_attention
from foretell.sparse.policies import OBSERVED
from foretell.types import NO_NEEDS, Needs

_GOAL = 4.0  # times plain decoding's tokens per second
_READ_BYTES, _PRODUCT = 1 << 28, 1536  # sizes at which bandwidth and FLOP/s are measured
_KV_BYTES = 4  # of a value in the cache
_MACHINE_TRIES = 5
_BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0625}  # with a scale per block of 64


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests with histories of `context` tokens."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context}x{self.batch}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of steps, and what bytes and FLOPs predict for them.

    Args:
        plain: one row per request, all keys.
        classic: verification over all keys.
        sparse: verification over a selection; `selecting` of them make it, look-ahead included.
        roofline: the same three, predicted, selecting not included.
        layers_kept: layers with memory of their own; 1 = all share one's.
    """

    cell: Cell
    plain: float
    classic: float
    sparse: float
    selecting: float
    roofline: tuple[float, float, float]
    layers_kept: int

    @property
    def to_plain(self) -> float:
        return self.plain / self.sparse

    @property
    def to_classic(self) -> float:
        return self.classic / self.sparse

    def al_for_goal(self, draft_s: float) -> float:
        """The acceptance length at which speculation makes `_GOAL` times plain decoding's tokens."""
        return _GOAL * (self.sparse + draft_s) / self.plain

    def tokens_per_s(self, al: float, draft_s: float) -> float:
        """Of all requests together, with drafts that take `draft_s` per step."""
        return self.cell.batch * al / (self.sparse + draft_s)

    def to_json(self) -> dict[str, object]:
        plain, classic, sparse = self.roofline
        return {
            "context": self.cell.context,
            "batch": self.cell.batch,
            **{f"{name}_ms": round(1000 * getattr(self, name), 4) for name in ("plain", "classic", "sparse")},
            "selecting_ms": round(1000 * self.selecting, 4),
            "plain_to_sparse": round(self.to_plain, 3),
            "classic_to_sparse": round(self.to_classic, 3),
            "roofline_plain_to_sparse": round(plain / sparse, 3),
            "roofline_classic_to_sparse": round(classic / sparse, 3),
            "layers_with_own_memory": self.layers_kept,
        }


def measure_machine() -> Machine:
    """Bytes per second that a sum reads, and FLOP/s of torch's own fp32 product: medians."""
    flat = torch.ones(_READ_BYTES // 4)
    left = torch.randn(_PRODUCT, _PRODUCT)
    reads, products = [], []
    for _ in range(_MACHINE_TRIES + 1):
        start = time.perf_counter()
        flat.sum()
        middle = time.perf_counter()
        left @ left
        reads.append(middle - start)
        products.append(time.perf_counter() - middle)
    read, product = (statistics.median(each[1:]) for each in (reads, products))
    return Machine(_READ_BYTES / read, 2 * _PRODUCT**3 / product)


def parameters(config: DecoderConfig) -> int:
    """Weights that a pass with logits for every row multiplies with."""
    qkv = config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim
    out, mlp = config.heads * config.head_dim * config.hidden, 3 * config.hidden * config.intermediate
    return config.layers * (qkv + out + mlp) + config.vocab_size * config.hidden


def weight_bytes(folder: Path, config: DecoderConfig, weights: str) -> float:
    """Bytes of the weights that a pass reads, kept as `weights` says."""
    if weights in _BYTES_PER_WEIGHT:
        return _BYTES_PER_WEIGHT[weights] * parameters(config)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table = config.vocab_size * config.hidden
    return stored * parameters(config) / (parameters(config) + (0 if config.tied else table))


def policy_of(name: str) -> Policy:
    """A selection policy by name.

    Raises:
        InputError: there is none.
    """
    return POLICIES[name]


def predict(
    machine: Machine, config: DecoderConfig, bytes_of_weights: float, cell: Cell, rows: int, keys: int
) -> float:
    """Seconds of a step: products, then attention over `keys` per request, each bound by reading or by
    computing."""
    weights = machine.step_seconds(cell.batch * rows, bytes_of_weights, parameters(config))
    read = keys * config.kv_heads * config.head_dim * 2 * _KV_BYTES / machine.bandwidth
    computed = 4 * config.heads * config.head_dim * rows * keys / machine.flops
    return weights + config.layers * cell.batch * max(read, computed)


class World:
    """A model behind random histories.

    Args:
        rows: of a request in verification.
        kv_bytes: of memory for keys and values; with less than all layers need, they share one layer's.
    """

    def __init__(
        self, model: Decoder, cell: Cell, rows: int, policy: Policy, budget: int, kv_bytes: float
    ) -> None:
        self.model, self.cell, self.rows, self.budget = model, cell, rows, budget
        self._room = cell.context + rows
        self._random = torch.Generator().manual_seed(0)
        self.arena = self._arena(kv_bytes)
        self._leases = [Lease(i * self._room, self._room, [], cell.context) for i in range(cell.batch)]
        self._reader = KVReader(policy, budget, model.num_layers)
        self._middle = model.num_layers // 2
        self._show_histories()

    @property
    def layers_kept(self) -> int:
        """Layers whose keys have memory of their own."""
        return 1 if self.arena.keys_LKSD.stride(0) == 0 else self.model.num_layers

    def plain(self) -> float:
        """Seconds of plain decoding's step."""
        start = time.perf_counter()
        self._pass(1, None, NO_NEEDS)
        return time.perf_counter() - start

    def classic(self) -> float:
        """Seconds of a verification step that reads everything."""
        start = time.perf_counter()
        self._pass(self.rows, None, NO_NEEDS)
        return time.perf_counter() - start

    def sparse(self) -> tuple[float, float]:
        """Seconds of a verification step over a selection, and how many of them went into selecting."""
        start = time.perf_counter()
        selected = [self._select(number) for number in range(self.cell.batch)]
        selecting = time.perf_counter() - start
        output = self._pass(self.rows, selected, self._reader.needs)
        passed = time.perf_counter()
        self._observe(output, self.rows)
        end = time.perf_counter()
        return end - start, selecting + end - passed

    def _arena(self, kv_bytes: float) -> KVArena:
        config, slots = self.model.config, self.cell.batch * self._room
        all_bytes = config.layers * slots * config.kv_heads * config.head_dim * 2 * _KV_BYTES
        kept = config.layers if all_bytes <= kv_bytes else 1
        arena = KVArena(kept, config.kv_heads, config.head_dim, slots, self.model.dtype, self.model.device)
        for store_LKSD in (arena.keys_LKSD, arena.values_LKSD):
            store_LKSD.normal_(generator=self._random)
        shape = (config.layers, -1, -1, -1)
        arena.keys_LKSD, arena.values_LKSD = (
            store_LKSD.expand(shape) for store_LKSD in (arena.keys_LKSD, arena.values_LKSD)
        )
        return arena

    def _show_histories(self) -> None:
        """The reader has followed the requests; the draft's look-ahead has queries of this model."""
        for number in range(self.cell.batch):
            self._reader.start(number, self.cell.context)
        output = self._pass(self.rows, None, Needs(queries=(self._middle,)) | self._reader.needs)
        queries = output.queries[self._middle]
        self._spec, self._ahead_RHD = queries.spec, queries.q_THD[: self.rows - 1].clone()
        window = [row % self.rows for row in range(OBSERVED)]
        for number, lease in enumerate(self._leases):
            own = [number * self.rows + row for row in window]
            self._reader.observe(number, output.queries, own, self.arena, lease)

    def _pass(self, rows: int, selected: Sequence[Tensor | None] | None, needs: Needs) -> ForwardOutput:
        chosen = selected or [None] * self.cell.batch
        segments = [
            Segment(lease.start, lease.length, [1], [1] * (rows - 1), range(-1, rows - 2), selected=own_N)
            for lease, own_N in zip(self._leases, chosen, strict=True)
        ]
        output = self.model.forward(pack(segments, self.arena), needs)
        output.logits_RV.argmax(-1)
        return output

    def _select(self, number: int) -> Tensor | None:
        lease, ahead_N = self._leases[number], None
        if self._reader.wants_draft and len(self._ahead_RHD):
            ahead_N, last = torch.zeros(lease.length), [lease.length - 1] * len(self._ahead_RHD)
            keys_KND = self.arena.layer(self._middle)[0][:, lease.start : lease.start + lease.length]
            add_attention(ahead_N, self._ahead_RHD, keys_KND, self._spec, range(self._spec.heads), last)
        return self._reader.select(number, self.arena, lease, ahead_N)

    def _observe(self, output: ForwardOutput, rows: int) -> None:
        for number, lease in enumerate(self._leases):
            own = range(number * rows, (number + 1) * rows)
            self._reader.observe(number, output.queries, own, self.arena, lease)


def measure(
    world: World, machine: Machine, bytes_of_weights: float, repeats: int, done: Callable[[], None]
) -> Steps:
    """The three steps in turn, `repeats` times after one round to warm up: medians."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", "classic", "sparse", "selecting")}
    for _ in range(repeats + 1):
        times["plain"].append(world.plain())
        times["classic"].append(world.classic())
        sparse, selecting = world.sparse()
        times["sparse"].append(sparse)
        times["selecting"].append(selecting)
        done()
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    cell, rows, config = world.cell, world.rows, world.model.config
    sizes = (
        (1, cell.context + 1),
        (rows, cell.context + rows),
        (rows, min(world.budget, cell.context) + rows),
    )
    plain, classic, sparse = (predict(machine, config, bytes_of_weights, cell, r, keys) for r, keys in sizes)
    return Steps(cell, **medians, roofline=(plain, classic, sparse), layers_kept=world.layers_kept)


def plot(results: Sequence[Steps], path: Path, title: str) -> None:
    """How much sparse verification saves, by cell, measured and predicted, as a PNG."""
    from foretell.bench.plots import figure

    fig, axes = figure(title)
    places = range(len(results))
    lines = {
        "plain step": ([s.to_plain for s in results], [s.roofline[0] / s.roofline[2] for s in results]),
        "full verification": (
            [s.to_classic for s in results],
            [s.roofline[1] / s.roofline[2] for s in results],
        ),
    }
    for color, (name, (seen, predicted)) in enumerate(lines.items()):
        axes.plot(places, seen, marker="o", color=f"C{color}", label=name)
        axes.plot(places, predicted, linestyle="--", color=f"C{color}", label=f"{name}, by bytes and FLOPs")
    axes.set_xticks(list(places), [str(s.cell) for s in results])
    axes.set(xlabel="context x batch", ylabel="time relative to sparse verification", ylim=(0, None))
    axes.legend()
    fig.savefig(path)
