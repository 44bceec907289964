"""`foretell demo`: an answer with speculation, and what it is worth on four tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import print_json, progress_bar, stderr, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from foretell.api import LLM
    from foretell.bench.compare import Row

_QUESTION = "What is speculative decoding? Explain it with a short example."


def demo(
    ctx: typer.Context,
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    drafter_opt: opt.DrafterOptOpt = None,
    draft_tokens: opt.DraftTokensOpt = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs per task and method.", show_default=True, min=1)
    ] = 1,
    as_json: opt.JsonOpt = False,
    weights: opt.WeightsOpt = "stored",
    device: opt.DeviceOpt = "auto",
) -> None:
    """Stream an answer, then compare plain and speculative decoding on four tasks."""
    from foretell.api import LLM
    from foretell.bench.compare import compare, summarise
    from foretell.bench.items import single_turn
    from foretell.types import SamplingParams

    llm = opt.load_llm(ctx.params)
    if not as_json:
        _answer(llm)
    methods = {"plain": LLM(llm.loaded, drafter="none"), drafter: llm}
    items = single_turn("demo", llm, 128)
    with progress_bar() as bar:
        task = bar.add_task("plain and speculative, in turn", total=len(items) * len(methods) * repeats)
        runs = compare(methods, items, SamplingParams(), repeats, lambda run: bar.advance(task))
    rows = summarise(runs)
    if as_json:
        for row in rows:
            print_json(row.to_json())
    else:
        stdout().print(speed_table(f"{model}, greedy, {drafter}", rows))


def _answer(llm: LLM) -> None:
    from foretell.types import SamplingParams

    stderr().print(f"> {_QUESTION}", style="bold")
    for chunk in llm.stream([{"role": "user", "content": _QUESTION}], SamplingParams(max_tokens=160)):
        print(chunk.text, end="", flush=True)
    print(end="\n\n", flush=True)


def speed_table(title: str, rows: Sequence[Row]) -> Table:
    """Rows of a comparison as a table."""
    from rich.table import Table

    table = Table(title=title)
    for name in ("task", "method"):
        table.add_column(name)
    for name in ("tokens/s", "AL", "tokens/step", "speedup", "identical"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.task,
            row.method,
            f"{row.tokens_per_s:.1f}",
            f"{row.al:.2f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.ratio:.2f}x",
            "yes" if row.identical == row.answers else f"NO ({row.identical} of {row.answers})",
        )
    return table
