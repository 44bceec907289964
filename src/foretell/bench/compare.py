"""The same prompts through several methods in turn, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretell.api import LLM, Completion
from foretell.bench.items import Item
from foretell.stats import StepStats
from foretell.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """One answer to one item by one method; `seconds` includes reading the prompt."""

    item: Item
    method: str
    seconds: float
    completion: Completion

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.item.id,
            "method": self.method,
            "seconds": round(self.seconds, 4),
            "tokens": len(self.completion.token_ids),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """A method on a task, against plain decoding of the same prompts.

    Args:
        tokens_per_s: emitted tokens over wall-clock seconds, prompts included.
        ratio: wall-clock seconds of plain over this method's, medians of the repeats.
        identical: answers equal to plain's, of `answers`.
        stats: of all runs together.
    """

    method: str
    task: str
    tokens_per_s: float
    ratio: float
    al: float
    tokens_per_step: float
    identical: int
    answers: int
    stats: StepStats

    def to_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "task": self.task,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "ratio_to_plain": round(self.ratio, 3),
            "al": round(self.al, 3),
            "tokens_per_step": round(self.tokens_per_step, 3),
            "lossless": self.identical == self.answers,
        }


def compare(
    methods: Mapping[str, LLM],
    items: Sequence[Item],
    params: SamplingParams,
    repeats: int,
    on_run: Callable[[Run], None],
) -> list[Run]:
    """Runs every item through every method, `repeats` times, methods in turn.

    One answer of a few tokens per method comes first and is not counted. A prompt's prefix is never found
    in the cache. Within a repetition a drafter may learn from the answers to other prompts; it begins each
    one knowing nothing.
    """
    runs = []
    for llm in methods.values():
        llm.generate(items[0].ids, SamplingParams(max_tokens=min(8, items[0].max_tokens)))
    for repeat in range(repeats):
        for llm in methods.values():
            llm.engine.forget()  # a repetition must not find the answers of the one before
        for number, item in enumerate(items):
            names, shift = list(methods), (number + repeat) % len(methods)
            for name in names[shift:] + names[:shift]:
                runs.append(_run(name, methods[name], item, params))
                on_run(runs[-1])
    return runs


def _run(name: str, llm: LLM, item: Item, params: SamplingParams) -> Run:
    llm.engine.cache.forget()
    start = time.perf_counter()
    (completion,) = llm.generate(item.ids, params.replace(max_tokens=item.max_tokens))
    return Run(item, name, time.perf_counter() - start, completion)


def summarise(runs: Sequence[Run], by_task: bool = True) -> list[Row]:
    """Rows per task and method; the first method is the one that the others are compared with."""
    plain = runs[0].method
    tasks = list(dict.fromkeys(run.item.task for run in runs)) if by_task else ["overall"]
    methods = list(dict.fromkeys(run.method for run in runs))
    wanted = {run.item.id: run.completion.token_ids for run in runs if run.method == plain}
    rows = []
    for task in tasks:
        part = [run for run in runs if run.item.task == task or not by_task]
        base = sum(_seconds(part, plain).values())
        for method in methods:
            own = [run for run in part if run.method == method]
            seconds = sum(_seconds(part, method).values())
            stats = StepStats()
            for run in own:
                stats.add(run.completion.stats)
            tokens = sum({run.item.id: len(run.completion.token_ids) for run in own}.values())
            same = sum(run.completion.token_ids == wanted[run.item.id] for run in own)
            per_step = stats.emitted / stats.steps
            rows.append(
                Row(method, task, tokens / seconds, base / seconds, stats.al, per_step, same, len(own), stats)
            )
    return rows


def _seconds(runs: Sequence[Run], method: str) -> dict[str, float]:
    """Median seconds of each item."""
    times: dict[str, list[float]] = {}
    for run in runs:
        if run.method == method:
            times.setdefault(run.item.id, []).append(run.seconds)
    return {item: statistics.median(each) for item, each in times.items()}
