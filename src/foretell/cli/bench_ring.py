"""`foretell bench ring`: what ring attention costs over processes of this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save

_BALANCE_SHARD = 64  # tokens per rank of the balance table, which only counts


def ring(
    ranks: Annotated[
        int, typer.Option("--ranks", help="Processes, of one thread each.", show_default=True, min=2, max=64)
    ] = 2,
    shard: Annotated[
        list[int] | None, typer.Option("--shard", help="Tokens per rank; repeatable.  [default: 1024]", min=1)
    ] = None,
    layout: Annotated[
        str, typer.Option("--layout", help="contiguous, striped or zigzag.", show_default=True)
    ] = "zigzag",
    repeats: opt.RepeatsOpt = 5,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Balance of the layouts, bytes sent against the formula, transfers behind computing (trace as PNG)."""
    from foretell.bench import ring as bench
    from foretell.bench.timeline import draw
    from foretell.errors import InputError
    from foretell.parallel.layout import LAYOUTS

    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}", hint=f"one of: {', '.join(LAYOUTS)}")
    result_folder(out)
    lengths = shard or [1024]
    value: dict[str, Any] = {"ranks": ranks, "layout": layout}
    value["balance"] = bench.balance(ranks, _BALANCE_SHARD)
    value["by_shard"] = {}
    with progress_bar() as bar:
        task = bar.add_task("rings", total=len(lengths))
        for length in lengths:
            found, spans = bench.measure(bench.Setting(ranks, length), layout, repeats)
            value["by_shard"][length] = found
            path = out / f"ring-{ranks}x{length}.png"
            draw(spans, f"{ranks} processes, {length} tokens each, {layout}: one layer", path)
            stderr().print(f"wrote {path}", style="dim")
            bar.advance(task)
    save(out, "ring", {"ranks": ranks, "layout": layout}, value)
    if as_json:
        print_json(value)
    else:
        _print(value)


def _print(value: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout()
    table = Table(title=f"score cells over {value['ranks']} ranks, against the mean")
    for name in ("layout", "fullest rank", "all steps", "spread in a step"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for name, row in value["balance"].items():
        cells = f"{row['most_to_mean']:.3f}", f"{row['wall_to_mean']:.3f}", f"{row['spread_per_step']:.0f}"
        table.add_row(name, *cells)
    console.print(table)
    for length, row in value["by_shard"].items():
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
        console.print(f"{length} tokens per rank, ms of a layer: {times}")
        console.print(f"  pass-kv takes {row['overlap']:.3f} of computing alone", end="; ")
        console.print(f"sent {row['sent_bytes']['pass-kv']} bytes, by the formula {row['formula_bytes']:.0f}")
