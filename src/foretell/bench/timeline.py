"""Draws what ranks do over time: bars for computing, thinner ones for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretell.bench.plots import figure
from foretell.errors import InputError
from foretell.parallel.simulate import Span

# colour, and place and height within a rank's row
_LOOKS = {"compute": ("#3b7dd8", -0.35, 0.45), "transfer": ("#e0892f", 0.12, 0.25)}


def draw(spans: Sequence[Span], title: str, path: Path) -> None:
    """One row per rank, milliseconds from the left; written as PNG.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    fig, axis = figure(title)
    for kind, (colour, offset, height) in _LOOKS.items():
        own: dict[int, list[tuple[float, float]]] = {}
        for span in spans:
            if span.kind == kind and span.end > span.start:
                own.setdefault(span.rank, []).append((1e3 * span.start, 1e3 * (span.end - span.start)))
        for rank, bars in own.items():
            axis.broken_barh(
                bars, (rank + offset, height), facecolors=colour, edgecolor="white", linewidth=0.3
            )
        axis.plot([], [], color=colour, linewidth=6, label=kind)
    axis.set_xlabel("ms")
    axis.set_ylabel("rank")
    axis.invert_yaxis()
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    fig.legend(loc="outside lower center", ncols=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)
    except OSError as error:
        raise InputError(
            f"cannot write to {path.parent}: {error.strerror}", hint="choose another folder with --out"
        ) from error
