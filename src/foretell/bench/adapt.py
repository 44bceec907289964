"""How fast the planner notices that the text has changed: code edits first, then free text, in one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.api import LLM
from foretell.bench import tasks
from foretell.bench.items import Item
from foretell.bench.plots import figure
from foretell.errors import InputError
from foretell.planner import CostTable
from foretell.types import SamplingParams

_FREE = ("multi-turn", "qa")
_WINDOW = 10  # steps of a running mean
ENOUGH = 0.97  # of plain speed, at which speculation does no harm


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the part of the workload, and tokens drafted (verified), accepted and emitted."""

    part: str
    drafted: int
    accepted: int
    emitted: int

    def speed(self, cost: CostTable) -> float:
        """Against plain decoding, by the measured cost of its rows."""
        return self.emitted * cost(1) / cost(1 + self.drafted)


def workload(llm: LLM, max_tokens: int) -> list[tuple[str, Item]]:
    """Three edits of given code, then free answers."""
    edits, free = tasks.load(["edit"], 3), [p for p in tasks.load(["identity"]) if p.task in _FREE]
    items = tasks.encode(llm, [*edits, *free], max_tokens)
    return [("edits" if n < len(edits) else "free text", item) for n, item in enumerate(items)]


def run(llm: LLM, items: Sequence[tuple[str, Item]], on_item: Callable[[], None]) -> list[Step]:
    """Answers one after the other; a step per forward pass, but for those that read prompts.

    Raises:
        InputError: the answers of a part end with their first token.
    """
    steps = []
    for part, item in items:
        request = llm.engine.submit(item.ids, SamplingParams(max_tokens=item.max_tokens), llm.loaded.end_ids)
        while request.finish_reason is None:
            before = request.stats.counters()
            llm.engine.step()
            after = request.stats.counters()
            if before["steps"]:
                drafted, accepted, emitted = (
                    after[name] - before[name] for name in ("drafted", "accepted", "emitted")
                )
                steps.append(Step(part, drafted, accepted, emitted))
        on_item()
    if {step.part for step in steps} != {part for part, _ in items}:
        raise InputError("the answers are too short: there are no steps behind the first token")
    return steps


def running(steps: Sequence[Step], cost: CostTable) -> list[float]:
    """Mean speed against plain over each step and the nine after it, within one part; fewer at its end."""
    speeds = [step.speed(cost) for step in steps]
    out = []
    for at, step in enumerate(steps):
        near = [
            s
            for s, other in zip(speeds[at : at + _WINDOW], steps[at:], strict=False)
            if other.part == step.part
        ]
        out.append(sum(near) / len(near))
    return out


def steps_to_adapt(steps: Sequence[Step], cost: CostTable) -> int:
    """Steps after the change until the mean of ten is at least 0.97 of plain speed."""
    switch = switch_of(steps)
    means = running(steps, cost)[switch:]
    return next((n for n, mean in enumerate(means) if mean >= ENOUGH), len(means))


def switch_of(steps: Sequence[Step]) -> int:
    """The first step of the second part."""
    return next(n for n, step in enumerate(steps) if step.part != steps[0].part)


def plot(steps: Sequence[Step], cost: CostTable, path: Path) -> None:
    """Drafted and accepted tokens around the change, and the speed."""
    switch = switch_of(steps)
    first, last = max(0, switch - 60), min(len(steps), switch + 120)
    at = [n - switch for n in range(first, last)]
    fig, (left, right) = figure("from code edits to free text", 2)
    left.bar(at, [s.drafted for s in steps[first:last]], 1, color="tab:gray", label="drafted")
    left.bar(at, [s.accepted for s in steps[first:last]], 1, color="tab:green", label="accepted")
    left.set_ylabel("tokens")
    right.plot(at, running(steps, cost)[first:last])
    right.axhline(1, color="black", linewidth=0.8)
    right.set_ylabel(f"speed, plain = 1; mean of {_WINDOW} steps")
    right.set_ylim(0)
    left.legend(fontsize=8)
    for axis in (left, right):
        axis.axvline(-0.5, color="tab:red", linestyle=":")
        axis.set_xlabel("steps after the change")
    fig.savefig(path)
