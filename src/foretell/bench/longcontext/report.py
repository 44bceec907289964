"""Results as Markdown and as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.bench.longcontext.run import NEEDLE, PERPLEXITY
from foretell.bench.plots import figure

_Row = Mapping[str, Any]


def markdown(rows: Sequence[_Row], facts: Mapping[str, Any]) -> str:
    """Per length, a table of scores and one of what is behind them."""
    lines = ["# Quality of KV selection", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for length in dict.fromkeys(row["length"] for row in rows):
        here = [row for row in rows if row["length"] == length]
        title = f"{length} tokens" if length else "lengths as in the data"
        lines += ["", f"## {title}: scores, and in brackets what is kept of full KV's"]
        lines += ["", *_table(here, lambda row: cell(row))]
        lines += ["", "### Share of the true attention on the selection (ARR), %", ""]
        lines += _table(here, lambda row: "-" if row["arr"] is None else f"{100 * row['arr']:.1f}")
        lines += ["", "### Tokens of the history read per emitted token", ""]
        lines += _table(here, lambda row: f"{row['read_per_token']:.1f}")
    return "\n".join(lines) + "\n"


def cell(row: _Row) -> str:
    """A score, and what is kept of full KV's."""
    form = f"{row['score']:.3f}" if row["task"] == PERPLEXITY else f"{row['score']:.1f}"
    return form if row["kept"] is None or row["policy"] == "full" else f"{form} ({row['kept']:.3f})"


def _table(rows: Sequence[_Row], show: Any) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["method"], row["task"]): row for row in rows}
    lines = ["| method | " + " | ".join(tasks) + " |", "|---" * (1 + len(tasks)) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = (found.get((method, task)) for task in tasks)
        lines.append(f"| {method} | " + " | ".join("-" if r is None else show(r) for r in own) + " |")
    return lines


def plot_budgets(rows: Sequence[_Row], path: Path, title: str) -> None:
    """What is kept of full KV's quality by budget: a panel for retrieval, one for perplexity, per length."""
    wanted = [row for row in rows if row["budget"] and row["kept"] is not None]
    tasks = {row["task"] for row in wanted}
    chosen = [task for task in ("all retrieval", PERPLEXITY) if task in tasks] or sorted(tasks)[:1]
    lengths = list(dict.fromkeys(row["length"] for row in wanted if row["task"] in chosen))
    panels = [(length, task) for length in lengths for task in chosen]
    if not panels:
        return
    fig, axes = figure(title, len(panels))
    for axis, (length, task) in zip(axes if len(panels) > 1 else [axes], panels, strict=True):
        own = [row for row in wanted if (row["length"], row["task"]) == (length, task)]
        for policy in dict.fromkeys(row["policy"] for row in own):
            line = sorted((row["budget"], row["kept"]) for row in own if row["policy"] == policy)
            style = "--" if policy == "oracle" else "-"
            axis.plot(*zip(*line, strict=True), style, marker="o", markersize=3, label=policy)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{task}, {length} tokens", fontsize=9)
        axis.set_xlabel("tokens read")
        axis.set_ylabel("share of full KV's quality")
        axis.legend(fontsize=7)
    fig.savefig(path)


def plot_needles(cells: Sequence[_Row], path: Path, title: str) -> None:
    """Heat maps of the needle grid: length by depth, one per method, mean score."""
    own = [cell for cell in cells if cell["task"] == NEEDLE]
    if not own:
        return
    lengths = sorted({cell["length"] for cell in own})
    depths = sorted({cell["depth"] for cell in own})
    names = list(dict.fromkeys(o["method"] for cell in own for o in cell["outcomes"]))
    policies = list(dict.fromkeys(name.partition("@")[0] for name in names))
    budgets = [name for name in dict.fromkeys(name.partition("@")[2] for name in names) if name]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(1.9 * len(policies), 1.6 * max(1, len(budgets)) + 0.6), dpi=120)
    fig.set_layout_engine("constrained")
    FigureCanvasAgg(fig)
    fig.suptitle(title, fontsize=10)
    axes = fig.subplots(max(1, len(budgets)), len(policies), squeeze=False)
    for line, budget in enumerate(budgets or [""]):
        for column, policy in enumerate(policies):
            method = policy if policy == "full" else f"{policy}@{budget}"
            grid = [[_mean(own, method, length, depth) for length in lengths] for depth in depths]
            axis = axes[line][column]
            axis.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
            axis.set_title(method, fontsize=7)
            axis.set_xticks(range(len(lengths)), lengths, fontsize=5)
            axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=5)
    fig.savefig(path)


def _mean(cells: Sequence[_Row], method: str, length: int, depth: float) -> float:
    values = [
        outcome["value"]
        for cell in cells
        if (cell["length"], cell["depth"]) == (length, depth)
        for outcome in cell["outcomes"]
        if outcome["method"] == method
    ]
    return sum(values) / len(values) if values else float("nan")
