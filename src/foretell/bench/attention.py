"""What reading few keys saves in one attention layer, and what choosing them costs.

One layer of random keys and values, of which all requests read all keys, or a scattered selection; in turn,
medians. Beside it torch's attention with key/value heads expanded to query heads, one request after another
(expanding is not timed). Choosing is timed through `KVReader`, as the engine calls it: what a step of
verification confirms is observed, then the next step's keys are selected.

Shape suffixes: T packed rows, R rows of one request, H query heads, K key/value heads, N keys, D head size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention import Queries, Segment, pack
from foretell.cache import KVArena, Lease
from foretell.kernels import HeadSpec, Visibility, kernels_for
from foretell.sparse import POLICIES, KVReader, add_attention
from foretell.sparse.policies import OBSERVED

_CPU = torch.device("cpu")
_ASKED = 4  # heads that a profile asks (Dustin)
_MIDDLE = 0  # the arena's only layer


@dataclass(frozen=True, slots=True)
class Layout:
    """What is measured.

    Args:
        heads, kv_heads, dim: query heads, key/value heads, head size.
        layers: of the model; one is timed.
        batch: requests.
        rows: rows of a request in verification, its last token and the draft.
        budget: keys of the history that selected reading reads.
    """

    heads: int = 14
    kv_heads: int = 2
    dim: int = 64
    layers: int = 24
    batch: int = 16
    rows: int = 5
    budget: int = 512

    @property
    def spec(self) -> HeadSpec:
        return HeadSpec(self.heads, self.kv_heads, self.dim, self.dim**-0.5)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of one layer's attention behind `context` keys per request.

    Args:
        full, selected: all keys, and `budget` of them, for the rows of verification.
        plain: all keys, one row per request.
        unfolded: as `full`, by torch with expanded heads.
    """

    context: int
    full: float
    selected: float
    plain: float
    unfolded: float

    @property
    def speedup(self) -> float:
        return self.full / self.selected

    def to_json(self) -> dict[str, object]:
        times = {f"{k}_ms": round(1000 * v, 3) for k, v in asdict(self).items() if k != "context"}
        return {"context": self.context, **times, "full_to_selected": round(self.speedup, 2)}


@dataclass(frozen=True, slots=True)
class Choosing:
    """Seconds that a policy takes per step, for the whole batch.

    Args:
        asked: query heads whose attention is recomputed.
        share: of the self-attention of all layers over all keys, for the rows of verification.
        plain_share: the same, of plain decoding's one row.
    """

    policy: str
    asked: int
    seconds: float
    share: float
    plain_share: float

    def to_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "heads_asked": self.asked,
            "ms_per_step": round(1000 * self.seconds, 3),
            "share_of_full_attention": round(self.share, 5),
            "share_of_plain_attention": round(self.plain_share, 5),
        }


class World:
    """Random keys and values of one layer, for contexts up to `longest`."""

    def __init__(self, layout: Layout, longest: int) -> None:
        self.layout, self._room = layout, longest + layout.rows
        self.arena = KVArena(1, layout.kv_heads, layout.dim, layout.batch * self._room, torch.float32, _CPU)
        self._random = torch.Generator().manual_seed(0)
        for store_LKSD in (self.arena.keys_LKSD, self.arena.values_LKSD):
            store_LKSD.normal_(generator=self._random)
        self._kernels = kernels_for(_CPU, torch.float32, (layout.dim,))

    def reading(self, context: int, repeats: int, done: Callable[[], None]) -> Reading:
        """Every way of reading in turn, `repeats` times after one round to warm up."""
        full, plain = self._ours(context, self.layout.rows, False), self._ours(context, 1, False)
        selected = self._ours(context, self.layout.rows, True)
        ways = {"full": full, "selected": selected, "plain": plain, "unfolded": self._unfolded(context)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats + 1):
            for name, way in ways.items():
                times[name].append(way())
            done()
        return Reading(context, **{name: statistics.median(each[1:]) for name, each in times.items()})

    def choosing(
        self, policy: str, asked: int, context: int, repeats: int, ahead: int, draft_layers: int
    ) -> float:
        """Seconds of a step's choosing, for the whole batch.

        Args:
            asked: query heads, spread over all key/value heads.
            ahead: rows of the draft that look ahead, where the policy wants that; its keys are of this
                layer's shape.
            draft_layers: layers of the draft that are asked.
        """
        spec = HeadSpec(asked, min(asked, self.layout.kv_heads), self.layout.dim, self.layout.spec.scale)
        reader = KVReader(POLICIES[policy], self.layout.budget, 1)
        leases = [Lease(r * self._room, self._room, [], context) for r in range(self.layout.batch)]
        draft_RHD = self._normal(ahead, asked, self.layout.dim)
        for number, lease in enumerate(leases):
            reader.start(number, context)
            self._observe(reader, number, lease, spec, OBSERVED)
        times = []
        for _ in range(repeats + 1):
            seconds = 0.0
            for number, lease in enumerate(leases):
                lookahead_N = None
                start = time.perf_counter()
                if reader.wants_draft and ahead:
                    lookahead_N = torch.zeros(context)
                    keys_KND = self._keys(lease)
                    for _ in range(draft_layers):
                        add_attention(
                            lookahead_N, draft_RHD, keys_KND, spec, range(asked), [context - 1] * ahead
                        )
                seconds += time.perf_counter() - start
                seconds += self._observe(reader, number, lease, spec, self.layout.rows)
                start = time.perf_counter()
                reader.select(number, self.arena, lease, lookahead_N)
                seconds += time.perf_counter() - start
            times.append(seconds)
        return statistics.median(times[1:])

    def _observe(self, reader: KVReader, number: int, lease: Lease, spec: HeadSpec, rows: int) -> float:
        """Seconds of showing the reader the lease's last rows, whose queries a pass has handed out."""
        handed_out = {_MIDDLE: Queries(self._normal(rows, spec.heads, spec.dim), spec)}
        start = time.perf_counter()
        reader.observe(number, handed_out, range(rows), self.arena, lease)
        return time.perf_counter() - start

    def _ours(self, context: int, rows: int, few: bool) -> Callable[[], float]:
        """One layer through our kernel."""
        layout, segments = self.layout, []
        for number in range(layout.batch):
            chosen_N = None
            if few:
                chosen_N = torch.randperm(context, generator=self._random)[: layout.budget].sort().values
            draft, parents = [0] * (rows - 1), range(-1, rows - 2)
            segments.append(Segment(number * self._room, context, [0], draft, parents, selected=chosen_N))
        seen: Visibility = pack(segments, self.arena).seen(None)
        total = layout.batch * rows
        q_THD = self._normal(total, layout.heads, layout.dim)
        k_TKD, v_TKD = (self._normal(total, layout.kv_heads, layout.dim) for _ in range(2))
        cache = self.arena.layer(_MIDDLE)

        def run() -> float:
            start = time.perf_counter()
            self._kernels.attend(q_THD, k_TKD, v_TKD, cache, seen, layout.spec)
            return time.perf_counter() - start

        return run

    def _unfolded(self, context: int) -> Callable[[], float]:
        """torch's attention with expanded heads, over as many keys."""
        layout, group = self.layout, self.layout.heads // self.layout.kv_heads
        q_HRD = self._normal(layout.heads, layout.rows, layout.dim)
        mask_RN = torch.ones(layout.rows, context + layout.rows, dtype=torch.bool).tril(context)

        def run() -> float:
            seconds = 0.0
            for number in range(layout.batch):
                slots = slice(number * self._room, number * self._room + context + layout.rows)
                k_HND, v_HND = (
                    store_KSD[:, slots].repeat_interleave(group, 0) for store_KSD in self.arena.layer(_MIDDLE)
                )
                start = time.perf_counter()
                F.scaled_dot_product_attention(q_HRD[None], k_HND[None], v_HND[None], attn_mask=mask_RN)
                seconds += time.perf_counter() - start
            return seconds

        return run

    def _keys(self, lease: Lease) -> Tensor:
        return self.arena.layer(_MIDDLE)[0][:, lease.start : lease.start + lease.length]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)


def measure_choosing(
    world: World, reading: Reading, repeats: int, ahead: int, draft_layers: int, done: Callable[[], None]
) -> list[Choosing]:
    """Every policy that chooses, with few heads asked and with all, against `reading`'s full attention."""
    layout, results = world.layout, []
    for policy in POLICIES:
        asks = bool(POLICIES[policy].needs)
        for asked in sorted({min(_ASKED, layout.heads), layout.heads}) if asks else [layout.heads]:
            seconds = world.choosing(policy, asked, reading.context, repeats, ahead, draft_layers)
            full, plain = (layout.layers * one for one in (reading.full, reading.plain))
            results.append(Choosing(policy, asked if asks else 0, seconds, seconds / full, seconds / plain))
            done()
    return results


def plot(readings: Sequence[Reading], layout: Layout, path: Path) -> None:
    """How much faster selected reading is, by context, as a PNG."""
    from foretell.bench.plots import figure

    fig, axes = figure(f"attention over {layout.budget} keys, batch {layout.batch}, {layout.rows} rows")
    contexts = [r.context for r in readings]
    axes.plot(contexts, [r.speedup for r in readings], marker="o", label="measured")
    read = [(c + layout.rows) / (min(layout.budget, c) + layout.rows) for c in contexts]
    axes.plot(contexts, read, linestyle="--", label="keys read, full to selected")
    axes.set(xlabel="keys per request", ylabel="full to selected", ylim=(0, None))
    axes.legend()
    fig.savefig(path)
