"""Drafters side by side on the tasks of Spec-Bench (Xia et al. 2024): what each accepts and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from foretell.api import LLM
from foretell.bench import tasks
from foretell.bench.compare import Row
from foretell.bench.items import Item
from foretell.bench.plots import figure
from foretell.errors import InputError


def questions(data: Path | None, llm: LLM, per_task: int, max_tokens: int) -> list[Item]:
    """First turns, the same number per task.

    Args:
        data: JSONL of any form that `tasks.load` knows; None = the built-in prompts.

    Raises:
        InputError: the file is of no such form, or a task has fewer prompts.
    """
    prompts = tasks.load(["identity" if data is None else str(data)], per_task)
    counts = Counter(prompt.task for prompt in prompts)
    if data is not None and (short := [f"{t} ({n})" for t, n in counts.items() if n < per_task]):
        raise InputError(f"{data} has fewer than {per_task} prompts of {', '.join(short)}")
    return tasks.encode(llm, prompts, max_tokens)


def to_json(row: Row) -> dict[str, object]:
    """A row with acceptance by position, and milliseconds per step of drafting and of the target."""
    stats = row.stats
    steps = max(1, stats.steps)
    return {
        **row.to_json(),
        "marginal_acceptance": [round(x, 4) for x in stats.marginal],
        "conditional_acceptance": [round(x, 4) for x in stats.conditional],
        "drafted_per_step": round(stats.drafted / steps, 2),
        "draft_ms": round(1000 * stats.draft_s / steps, 3),
        "target_ms": round(1000 * stats.target_s / steps, 3),
        "verify_ms": round(1000 * stats.verify_s / steps, 3),
        "rest_ms": round(1000 * stats.rest_s / steps, 3),
    }


def plot(rows: Sequence[Row], overall: Sequence[Row], path: Path, title: str) -> None:
    """Ratio to plain per task, and acceptance by position over all tasks."""
    fig, (bars, curves) = figure(title, 2)
    tasks = list(dict.fromkeys(row.task for row in rows))
    methods = [row.method for row in overall if row.stats.drafts]
    width = 0.8 / max(1, len(methods))
    for index, method in enumerate(methods):
        own = {row.task: row.ratio for row in rows if row.method == method}
        places = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(tasks))]
        bars.bar(places, [own[task] for task in tasks], width, label=method)
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right")
    bars.set_ylabel("speed, plain = 1")
    bars.legend(fontsize=7)
    for row in overall:
        if row.stats.drafts:
            share = row.stats.marginal[:12]
            curves.plot(range(1, len(share) + 1), share, marker="o", markersize=3, label=row.method)
    curves.set_xlabel("position in the draft")
    curves.set_ylabel("share of drafts kept so far")
    curves.set_ylim(0, 1)
    fig.savefig(path)
