"""Results of `foretell bench run` as Markdown and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.bench.plots import figure

COLUMNS = (
    ("method", "method"),
    ("tokens_per_s", "tokens/s"),
    ("ratio_to_plain", "to plain"),
    ("decode_tokens_per_s", "decoding"),
    ("decode_ratio", "decoding to plain"),
    ("al", "AL"),
    ("tokens_per_step", "tokens/step"),
    ("overhead_c", "c"),
    ("ttft_s", "TTFT s"),
    ("itl_ms", "ITL ms"),
    ("lossless", "lossless"),
)


def markdown(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """A table per model, batch size, temperature and task; wins and losses alike."""
    lines = ["# Results", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for model, batch, temperature in dict.fromkeys(map(_part, rows)):
        lines += ["", f"## {model}, batch {batch}, temperature {temperature:g}"]
        here = [r for r in rows if _part(r) == (model, batch, temperature)]
        for task in dict.fromkeys(r["task"] for r in here):
            lines += ["", f"### {task}", "", "| " + " | ".join(title for _, title in COLUMNS) + " |"]
            lines.append("|---" * len(COLUMNS) + "|")
            for row in here:
                if row["task"] == task:
                    lines.append("| " + " | ".join(cell(row[key]) for key, _ in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _part(row: Mapping[str, Any]) -> tuple[str, int, float]:
    return row["model"], row["batch"], row["temperature"]


def cell(value: Any) -> str:
    """A value as text: dashes for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Speed against plain per task, one panel per batch size."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    fig, axes = figure(title, len(batches))
    for axis, batch in zip(axes if len(batches) > 1 else [axes], batches, strict=True):
        here = [r for r in rows if r["batch"] == batch and r["ratio_to_plain"] is not None]
        tasks = list(dict.fromkeys(r["task"] for r in here))
        methods = [m for m in dict.fromkeys(r["method"] for r in here) if m != "plain"]
        width = 0.8 / max(1, len(methods))
        for place, method in enumerate(methods):
            values = {r["task"]: r["ratio_to_plain"] for r in here if r["method"] == method}
            at = [i + (place - (len(methods) - 1) / 2) * width for i in range(len(tasks))]
            axis.bar(at, [values.get(task, 0) for task in tasks], width, label=method)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", fontsize=7)
        axis.set_title(f"batch {batch}", fontsize=9)
        axis.set_ylabel("speed, plain = 1")
        if methods:
            axis.legend(fontsize=7)
    fig.savefig(path)
