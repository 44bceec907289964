"""`foretell bench weights`: fewer bits against perplexity and time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save


def weights(
    model: opt.ModelOpt = "smollm2-135m",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of text.", show_default=True, min=2)
    ] = 20_000,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file.  [default: Python's language reference]")
    ] = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Perplexity on real text and time per step, for every way to keep weights on a CPU."""
    from foretell.bench import weights as bench
    from foretell.models.load import load_model
    from foretell.planner.cost import measure

    result_folder(out)
    forms: list[bench.Form] = []
    with model_progress() as report:
        first = load_model(model, device="cpu", weights="fp32", report=report)
    ids = bench.text_tokens(first.tokenizer, tokens, text)
    with progress_bar() as bar:
        for name in ("fp32", "stored", "fp16", "int8"):
            task = bar.add_task(name, total=bench.windows(ids))
            loaded = first if name == "fp32" else load_model(model, device="cpu", weights=name)
            seconds = measure(loaded.model, rows=(1, 8)).seconds
            found = bench.perplexity(loaded.model, ids, partial(bar.advance, task))
            base = forms[0].perplexity if forms else found
            forms.append(bench.Form(name, found, found / base, seconds))
            del loaded
    save(out, "weights", {"model": model, "tokens": tokens}, [form.to_json() for form in forms])
    if as_json:
        for form in forms:
            print_json(form.to_json())
        return
    from rich.table import Table

    table = Table(title=f"{model}, {tokens} tokens of {text or 'the language reference of Python'}")
    for column in ("weights", "perplexity", "to fp32's", "ms, 1 row", "ms, 8 rows", "8 : 1", "plain speed"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for form in forms:
        one, eight = form.seconds[1], form.seconds[8]
        table.add_row(
            form.weights,
            f"{form.perplexity:.3f}",
            f"{100 * (form.ratio - 1):+.2f} %",
            f"{1000 * one:.1f}",
            f"{1000 * eight:.1f}",
            f"{eight / one:.2f}",
            f"{forms[0].seconds[1] / one:.2f}x",
        )
    stdout().print(table)
