"""What is measured: foretell with a drafter, or another engine on the same prompts.

A method answers a batch and says when its tokens came. Peers are extras: one that is not installed is
skipped by name.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from foretell.api import LLM
from foretell.bench.items import Item
from foretell.engine import Request
from foretell.errors import InputError
from foretell.types import SamplingParams, StepStats


class Unavailable(Exception):
    """A peer cannot be run here; the message says why."""


@dataclass(slots=True)
class Answer:
    """What came of one prompt.

    Args:
        first_s: seconds until its first token.
        gaps_s: seconds between arrivals, one per token after the first arrival; tokens that come together
            share their gap.
        stats: what speculation did, where the method tells.
    """

    token_ids: list[int]
    first_s: float
    gaps_s: list[float] = field(default_factory=list)
    stats: StepStats | None = None


class Method(Protocol):
    """An engine in a mode.

    Attributes:
        name: in tables.
        batches: whether it takes more than one prompt at a time.
    """

    name: str
    batches: bool

    def begin(self) -> None:
        """Forgets what earlier answers have left."""
        ...

    def answer(self, items: Sequence[Item], params: SamplingParams) -> list[Answer]:
        """Answers a batch; no prompt is found in a cache."""
        ...


class Foretell:
    """foretell with a drafter: "plain", SPEC, or SPEC@N for drafts of always N tokens."""

    batches = True

    def __init__(self, name: str, loaded: LLM, max_batch: int, kv_tokens: int) -> None:
        self.name = name
        spec, at, length = name.rpartition("@") if name.rpartition("@")[2].isdigit() else (name, "", "")
        drafter = "none" if spec == "plain" else spec
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
        while any(request.finish_reason is None for request in requests):
            for request in engine.step():
                arrivals[request.id].append((time.perf_counter() - start, request.emitted))
        return [_answer(request, arrivals[request.id]) for request in requests]


def _answer(request: Request, arrivals: list[tuple[float, int]]) -> Answer:
    gaps: list[float] = []
    for (before, known), (now, count) in pairwise(arrivals):
        gaps += [(now - before) / max(1, count - known)] * max(0, count - known)
    return Answer(list(request.output_ids), arrivals[0][0], gaps, request.stats)


class Transformers:
    """transformers' generate: plain, prompt lookup, or with an assistant model; fp32, batch 1."""

    batches = False

    def __init__(self, mode: str, loaded: LLM, assistant: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.name = f"transformers {mode}".strip()
        folder = loaded.loaded.folder
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if mode == "prompt lookup" else {}
        if mode == "assistant":
            if assistant is None:
                raise Unavailable("it needs --assistant MODEL")
            from foretell.models.catalog import locate

            helper = AutoModelForCausalLM.from_pretrained(locate(assistant), dtype=torch.float32).eval()
            self._options = {"assistant_model": helper}
        self._ends = sorted(loaded.loaded.end_ids)

    def begin(self) -> None:
        """Nothing is left of earlier answers."""

    def answer(self, items: Sequence[Item], params: SamplingParams) -> list[Answer]:
        """See `Method`."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        (item,) = items
        if not params.greedy:
            raise Unavailable("it is compared greedily only")
        times: list[tuple[float, int]] = []

        class Clock(BaseStreamer):  # type: ignore[misc]
            def put(self, value: Any) -> None:
                times.append((time.perf_counter(), value.numel()))

            def end(self) -> None: ...

        start = time.perf_counter()
        with torch.inference_mode():
            ids = self._model.generate(
                torch.tensor([item.ids]),
                max_new_tokens=item.max_tokens,
                do_sample=False,
                eos_token_id=self._ends or None,
                pad_token_id=0,
                streamer=Clock(),
                **self._options,
            )
        out = ids[0, len(item.ids) :].tolist()
        came = times[1:]  # the first is the prompt
        gaps = [now - before for (before, _), (now, count) in pairwise(came) for _ in range(count)]
        return [Answer(out, (came[0][0] if came else time.perf_counter()) - start, gaps)]


PEERS = {
    "transformers": ("transformers", ""),
    "transformers:pld": ("transformers", "prompt lookup"),
    "transformers:assistant": ("transformers", "assistant"),
}


def build(name: str, loaded: LLM, max_batch: int, kv_tokens: int, assistant: str | None) -> Method:
    """A method by name.

    Raises:
        Unavailable: a peer that is not installed, or lacks something.
        InputError: no such drafter, or a bad option.
    """
    if name not in PEERS:
        return Foretell(name, loaded, max_batch, kv_tokens)
    package, mode = PEERS[name]
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    try:
        return Transformers(mode, loaded, assistant)
    except (OSError, ValueError, InputError) as error:
        raise Unavailable(str(error)) from error
