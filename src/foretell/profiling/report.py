"""Curves of a search as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretell.bench.plots import figure
from foretell.profiling.run import Outcome

_LINES = {"draft only": "tab:green", "history only": "tab:orange", "random": "tab:gray", "oracle": "black"}


def plot(outcome: Outcome, path: Path) -> None:
    """ARR by target layer, by draft layers added, and by the look-ahead's share; on the searched prompts."""
    found, profile = outcome.found, outcome.profile
    budgets = sorted(outcome.searched)
    middle = budgets[len(budgets) // 2]
    fig, (by_layer, by_added, by_share) = figure(
        f"{profile.target.name}, draft {profile.draft.name}: attention recovery rate", 3
    )
    by_layer.plot(found.by_target_layer, marker="o", markersize=3)
    by_layer.axvline(found.target_layer, color="tab:red", linewidth=0.8)
    by_layer.set_xlabel("target layer")
    by_layer.set_ylabel("ARR")
    by_layer.set_title(f"history of one layer, k = {middle}", fontsize=9)
    names = [f"+{layer}" for layer, _ in found.by_draft_layers]
    by_added.plot(names, [arr for _, arr in found.by_draft_layers], marker="o")
    by_added.set_xlabel("draft layer added (the last may have been refused)")
    by_added.set_title(f"half by the draft, k = {middle}", fontsize=9)
    for budget in budgets:
        curve = found.by_share[budget]
        by_share.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=f"k = {budget}")
    by_share.set_xlabel("share of the look-ahead")
    by_share.set_title("share", fontsize=9)
    _lines(by_share, outcome.searched[middle])
    by_share.legend(fontsize=7, title=f"lines: k = {middle}", title_fontsize=7)
    fig.savefig(path, dpi=80)


def _lines(axis: Any, arr: dict[str, float]) -> None:
    for name, colour in _LINES.items():
        axis.axhline(arr[name], color=colour, linewidth=0.8, linestyle="--", label=name)
