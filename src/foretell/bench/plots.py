"""Figures without a display."""

from __future__ import annotations

from typing import Any


def figure(title: str, columns: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure with one row of axes, drawn to files only."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5.5 * columns, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(fig)
    fig.suptitle(title)
    axes = fig.subplots(1, columns)
    for axis in axes if columns > 1 else [axes]:
        axis.grid(alpha=0.3)
    return fig, axes
