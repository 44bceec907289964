"""What training looked like: loss, share of right drafts by depth, acceptance length in the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foretell.bench.plots import figure

_WINDOW = 20  # steps that a point is the mean of


def draw(log: Sequence[dict[str, Any]], kind: str, path: Path) -> None:
    """Writes the curves of a trainer's log as PNG."""
    steps = [entry for entry in log if "loss" in entry]
    judged = [entry for entry in log if "evaluation" in entry]
    fig, (loss, right, al) = figure(f"training {kind}", columns=3)
    loss.plot(*_smooth(steps, lambda e: e["loss"]))
    loss.set(title="loss", xlabel="step")
    for depth in range(max((len(entry["right"]) for entry in steps), default=0)):
        known = [entry for entry in steps if len(entry["right"]) > depth]
        right.plot(*_smooth(known, _share(depth)), label=f"{depth + 1}")
    right.set(title="drafts right up to token n", xlabel="step", ylim=(0, 1))
    right.legend(fontsize=7)
    al.plot([e["step"] for e in judged], [e["evaluation"]["al"] for e in judged], marker="o")
    al.set(title="acceptance length, held-out prompts", xlabel="step")
    fig.savefig(path)


def _share(depth: int) -> Callable[[dict[str, Any]], float]:
    """Of the rows of a depth that are right, and were at every depth before."""

    def share(entry: dict[str, Any]) -> float:
        return float(entry["right"][depth] / max(1, entry["count"][depth]))

    return share


def _smooth(
    entries: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]
) -> tuple[list[int], list[float]]:
    """Steps and means over the last few of them."""
    values = [value(entry) for entry in entries]
    means = []
    for place in range(len(values)):
        part = values[max(0, place - _WINDOW + 1) : place + 1]
        means.append(sum(part) / len(part))
    return [entry["step"] for entry in entries], means
