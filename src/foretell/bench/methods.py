"""What is measured: a method answers a batch and says when its tokens came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from foretell.api import LLM
from foretell.bench.items import Item
from foretell.stats import StepStats
from foretell.types import SamplingParams

PLAIN = "plain"


class Unavailable(Exception):
    """A method cannot be run here; the message says why."""


@dataclass(slots=True)
class Answer:
    """What came of one prompt.

    Args:
        token_ids: the answer; where a method only tells its text, that text's tokens.
        first_s: seconds until its first token; `first` tokens came with it.
        gaps_s: seconds between arrivals, one per token after the first arrival; tokens that come together
            share their gap.
        stats: what speculation did, where the method tells.
        count: tokens generated, where a text may have been made of other tokens.
    """

    token_ids: list[int]
    first_s: float
    gaps_s: list[float] = field(default_factory=list)
    stats: StepStats | None = None
    count: int = -1
    first: int = 1

    def __post_init__(self) -> None:
        if self.count < 0:
            self.count = len(self.token_ids)

    @classmethod
    def timed(
        cls,
        token_ids: list[int],
        start: float,
        arrivals: Sequence[tuple[float, int]],
        *,
        stats: StepStats | None = None,
        count: int = -1,
    ) -> Answer:
        """From when tokens came, and how many; none or fewer where a stop string took some back."""
        at, first = arrivals[0] if arrivals else (time.perf_counter(), len(token_ids))
        gaps = [(now - before) / came for (before, _), (now, came) in pairwise(arrivals) for _ in range(came)]
        return cls(token_ids, at - start, gaps, stats, count, first)


class Method(Protocol):
    """An engine in a mode.

    Attributes:
        name: in tables.
        reference: the method whose answers its own must equal: the same engine without speculation.
        batches: whether it takes more than one prompt at a time.
        samples: whether it is compared at temperatures above 0.
    """

    name: str
    reference: str
    batches: bool
    samples: bool

    def begin(self) -> None:
        """Forgets what earlier answers have left."""
        ...

    def answer(self, items: Sequence[Item], params: SamplingParams) -> list[Answer]:
        """Answers a batch; no prompt is found in a cache.

        Raises:
            Unavailable: it turns out that it cannot.
        """
        ...


class Foretell:
    """foretell with a drafter: "plain", SPEC, or SPEC@N for drafts of always N tokens.

    Args:
        label: what tells it from the same method on other weights.
    """

    batches = samples = True

    def __init__(self, name: str, loaded: LLM, max_batch: int, kv_tokens: int, label: str = "") -> None:
        self.name = f"{name} {label}".strip()
        self.reference = f"{PLAIN} {label}".strip()
        spec, at, length = name.rpartition("@") if name.rpartition("@")[2].isdigit() else (name, "", "")
        drafter = "none" if spec == PLAIN else spec
        self._llm = LLM(
            loaded.loaded,
            drafter=drafter,
            draft_tokens=int(length) if at else None,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
        )

    def begin(self) -> None:
        """See `Method`."""
        self._llm.engine.forget()

    def answer(self, items: Sequence[Item], params: SamplingParams) -> list[Answer]:
        """See `Method`."""
        engine = self._llm.engine
        engine.cache.forget()
        start = time.perf_counter()
        requests = [
            engine.submit(item.ids, params.replace(max_tokens=item.max_tokens), self._llm.loaded.end_ids)
            for item in items
        ]
        arrivals: dict[int, list[tuple[float, int]]] = {request.id: [] for request in requests}
        emitted = dict.fromkeys(arrivals, 0)
        while any(request.finish_reason is None for request in requests):
            advanced = engine.step()
            now = time.perf_counter()
            for request in advanced:
                arrivals[request.id].append((now, request.emitted - emitted[request.id]))
                emitted[request.id] = request.emitted
        return [Answer.timed(list(r.output_ids), start, arrivals[r.id], stats=r.stats) for r in requests]
