"""What `/stats` tells: the server, its load, what speculation did, and what the planner decides now."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell import __version__
from foretell.api import LLM
from foretell.engine import Engine, Request
from foretell.planner import AdaptivePlanner
from foretell.server.metrics import Metrics
from foretell.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Shape:
    """What does not change while a server runs.

    Args:
        model: what clients call it; `served` is what it was loaded as.
        drafters: by `origin` of their drafts.
        started: seconds since 1970.
    """

    model: str
    served: str
    impl: str
    weights: str
    drafters: tuple[str, ...]
    rule: str
    lossless: bool
    context: int
    kv_slots: int
    max_batch: int
    max_queue: int
    started: int

    @property
    def fingerprint(self) -> str:
        """For OpenAI's `system_fingerprint`."""
        return f"foretell-{__version__}-{self.impl}-{self.weights}"


def shape_of(llm: LLM, settings: Settings) -> Shape:
    """The facts of a loaded model and its server. A path is served under its last part."""
    name = llm.loaded.name
    target = llm.loaded.model
    return Shape(
        model=Path(name).name if Path(name).exists() else name,
        served=name,
        impl=target.impl,
        weights=target.weights,
        drafters=llm.origins,
        rule=llm.engine.rule.name,
        lossless=llm.engine.rule.lossless and not llm.engine.lossy,
        context=target.max_context,
        kv_slots=llm.engine.cache.arena.slots,
        max_batch=llm.max_batch,
        max_queue=settings.max_queue,
        started=int(time.time()),
    )


def snapshot(llm: LLM, shape: Shape, metrics: Metrics) -> dict[str, Any]:
    """Everything as JSON. Called between two steps."""
    engine = llm.engine
    stats = engine.stats.to_json()
    return {
        "server": {**asdict(shape), "version": __version__, "uptime_s": time.time() - shape.started},
        "load": _load(engine),
        "totals": {**{name: stats[name] for name in _TOTALS}, "preempted": engine.stats.preempted},
        "seconds": {name: stats["seconds"][name] for name in ("draft", "target", "verify", "rest")},
        "speed": {"plain_equivalent_speedup": metrics.speedup, **metrics.latencies()},
        "planner": _planner(engine),
        "requests": [_request(request, "running") for request in engine.running]
        + [_request(request, "waiting") for request in engine.waiting],
    }


_TOTALS = (
    "steps",
    "emitted",
    "drafts",
    "drafted",
    "accepted",
    "al",
    "marginal_acceptance",
    "conditional_acceptance",
)


def _load(engine: Engine) -> dict[str, Any]:
    cache = engine.cache
    return {
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "kv_slots": cache.arena.slots,
        "kv_reserved": cache.reserved,
        "kv_used": cache.used,
        "kv_kept": cache.kept,
        "prefix_hits": cache.reused,
    }


def _planner(engine: Engine) -> dict[str, Any]:
    planner = engine.planner
    cost_ms = None
    if isinstance(planner, AdaptivePlanner):
        cost_ms = {str(rows): round(1000 * planner.cost(rows), 3) for rows in planner.cost.seconds}
    return {
        "kind": type(planner).__name__,
        "max_draft": planner.max_draft,
        "reasons": engine.stats.plans,
        "cost_ms": cost_ms,
    }


def _request(request: Request, state: str) -> dict[str, Any]:
    reading = request.lease is not None and request.unread > 1
    return {
        "id": request.id,
        "state": "reading" if reading else state,
        "prompt_tokens": request.prompt_length,
        "emitted": request.emitted,
        "max_tokens": request.params.max_tokens,
        "drafted": request.stats.drafted,
        "accepted": request.stats.accepted,
        "al": round(request.stats.al, 4),
        "preempted": request.stats.preempted,
        "plan": None if request.plan is None else asdict(request.plan),
    }
