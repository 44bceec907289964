"""What `/metrics` tells Prometheus: vLLM's names for speculation, and where the time goes.

Counters follow the engine's own totals, step by step. Everything lives in a registry of its own, so that
several servers in one process do not mix.
"""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foretell.engine import Engine, Request
from foretell.planner import AdaptivePlanner

_PHASES = ("draft_s", "target_s", "verify_s", "rest_s")
_LATELY = 500  # arrivals that latencies are told over
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server. The worker's thread reports steps, the event loop everything else.

    Attributes:
        decode_s, plain_s: seconds of steps that only decoded, and what plain decoding of the same tokens in
            the same batches would have taken by the planner's cost table; both 0 where there is none.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decode_s = self.plain_s = 0.0
        self._known = dict.fromkeys(("steps", "drafts", "drafted", "accepted", "emitted", "preempted"), 0)
        self._known_s = dict.fromkeys(_PHASES, 0.0)
        self._known_at: list[int] = []
        self._reused = 0
        self._lately: dict[str, deque[float]] = {name: deque(maxlen=_LATELY) for name in ("ttft_s", "itl_s")}
        self._counters()
        self._gauges()

    def _counters(self) -> None:
        count, histogram = self._counter, self._histogram
        self._by_name = {
            "steps": count("engine_steps", "Forward passes of the target."),
            "drafts": count("spec_decode_num_drafts", "Verifications that had a draft."),
            "drafted": count("spec_decode_num_draft_tokens", "Draft tokens verified."),
            "accepted": count("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
            "emitted": count("generation_tokens", "Tokens emitted."),
            "preempted": count("num_preemptions", "Requests that gave their slots back and read again."),
        }
        per_position = "spec_decode_num_accepted_tokens_per_pos"
        self._at = count(per_position, "Draft tokens accepted, by their place in the draft.", "position")
        self._phase = count("step_seconds", "Seconds of steps, by phase.", "phase")
        self._ended = count("request_success", "Answers by how they ended.", "finished_reason")
        self._refused = count("requests_refused", "Answers refused because the queue was full.")
        self._prompt = count("prompt_tokens", "Tokens of prompts.")
        self._hits = count("prefix_cache_hits", "Prompt tokens whose keys were found in the cache.")
        self._first = histogram("time_to_first_token_seconds", "From the request to its first token.", _FIRST)
        self._gap = histogram("inter_token_latency_seconds", "Between tokens of an answer.", _GAPS)
        self._whole = histogram("e2e_request_latency_seconds", "From the request to its end.", _WHOLE)

    def _gauges(self) -> None:
        gauge = self._gauge
        self._running = gauge("num_requests_running", "Answers that run.")
        self._waiting = gauge("num_requests_waiting", "Answers that wait for room.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV arena that running answers hold.")
        self._speedup = gauge(
            "plain_equivalent_speedup",
            "Speed of decoding against plain decoding, by the planner's cost table; 0 = not known.",
        )

    def step(self, engine: Engine) -> None:
        """A step is finished."""
        stats = engine.stats
        emitted = stats.emitted - self._known["emitted"]
        for name, known in self._known.items():
            self._by_name[name].inc(max(0, getattr(stats, name) - known))
            self._known[name] = getattr(stats, name)
        for name, seconds in self._known_s.items():
            self._phase.labels(name.removesuffix("_s")).inc(getattr(stats, name) - seconds)
            self._known_s[name] = getattr(stats, name)
        self._known_at += [0] * (len(stats.accepted_at) - len(self._known_at))
        for place, accepted in enumerate(stats.accepted_at):
            if accepted > self._known_at[place]:
                self._at.labels(str(place)).inc(accepted - self._known_at[place])
                self._known_at[place] = accepted
        self._hits.inc(engine.cache.reused - self._reused)
        self._reused = engine.cache.reused
        self._compare(engine, emitted)
        self.load(engine)

    def load(self, engine: Engine) -> None:
        """Who runs and waits now."""
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._usage.set(engine.cache.reserved / engine.cache.arena.slots)

    def refused(self) -> None:
        """A request was refused: the queue is full."""
        self._refused.inc()

    def first_token(self, seconds: float) -> None:
        """An answer began."""
        self._first.observe(seconds)
        self._lately["ttft_s"].append(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        """Tokens of an answer came; each took so long."""
        for _ in range(tokens):
            self._gap.observe(seconds)
        self._lately["itl_s"].append(seconds)

    def finished(self, reason: str, seconds: float, request: Request) -> None:
        """An answer ended."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)
        self._prompt.inc(request.prompt_length)

    @property
    def speedup(self) -> float | None:
        """Of decoding against plain decoding; None = not known."""
        return self.plain_s / self.decode_s if self.decode_s else None

    def latencies(self) -> dict[str, dict[str, float] | None]:
        """Medians and 95th percentiles over the last answers and arrivals."""
        return {name: _quantiles(sorted(values)) for name, values in self._lately.items()}

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _compare(self, engine: Engine, emitted: int) -> None:
        report, planner = engine.last, engine.planner
        if report is None or report.prompt_rows or not isinstance(planner, AdaptivePlanner):
            return
        batch = len(report.judged)
        if batch and emitted > 0:
            self.decode_s += report.draft_s + report.target_s + report.verify_s + report.rest_s
            self.plain_s += planner.cost(batch) * emitted / batch
            self._speedup.set(self.plain_s / self.decode_s)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"foretell:{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"foretell:{name}", about, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"foretell:{name}", about, buckets=buckets, registry=self.registry)


def _quantiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    at = {"p50": 0.5, "p95": 0.95}
    return {name: values[min(len(values) - 1, int(share * len(values)))] for name, share in at.items()}
