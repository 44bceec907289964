"""`foretell bench drafters` and `foretell bench suffix`: what drafters accept and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save


def drafters(
    model: opt.ModelOpt = "smollm2-135m",
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", help="Repeatable.  [default: those that need nothing else]"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Spec-Bench's JSONL.  [default: built-in prompts]", exists=False),
    ] = None,
    per_task: Annotated[
        int, typer.Option("--per-task", help="Questions per task.", show_default=True, min=1)
    ] = 10,
    max_tokens: opt.MaxTokensOpt = 128,
    draft_tokens: opt.DraftTokensOpt = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Every drafter against plain decoding, per task: acceptance by position, costs, speed, identity.

    Drafts are as long as suits each drafter; `auto` alone plans by measurement.
    """
    from foretell.api import LLM
    from foretell.bench import drafters as bench
    from foretell.bench.compare import compare, summarise
    from foretell.drafters import DRAFTERS
    from foretell.types import SamplingParams

    result_folder(out)
    free = [n for n, e in DRAFTERS.items() if e.argument is None and n != "none"]
    names = list(dict.fromkeys(drafter or free))
    with model_progress() as report:
        plain = LLM(model, drafter="none", report=report)
        methods = {"plain": plain}
        for name in names:
            adaptive = name == "auto"  # the others show what they are by themselves
            methods[name] = LLM(
                plain.loaded, drafter=name, draft_tokens=draft_tokens, adaptive=adaptive, report=report
            )
    items = bench.questions(data, plain, per_task, max_tokens)
    with progress_bar() as bar:
        task = bar.add_task("methods in turn", total=len(items) * len(methods))
        runs = compare(methods, items, SamplingParams(), 1, lambda run: bar.advance(task))
    rows, overall = summarise(runs), summarise(runs, by_task=False)
    facts = {"model": model, "data": str(data or "built-in"), "per_task": per_task, "max_tokens": max_tokens}
    values = [bench.to_json(row) for row in [*rows, *overall]]
    save(out, "drafters", {**facts, "runs": [run.to_json() for run in runs]}, values)
    bench.plot(rows, overall, out / "drafters.png", f"{model}, greedy, {len(items)} prompts")
    if as_json:
        for value in values:
            print_json(value)
    else:
        _print_drafters(f"{model}, greedy, up to {max_tokens} tokens, {len(items)} prompts", values)


def _print_drafters(title: str, values: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title)
    columns = (
        "AL",
        "kept at 1 / 2 / 3 / 4",
        "drafted",
        "draft ms",
        "target ms",
        "tokens/s",
        "ratio",
        "lossless",
    )
    for name in ("task", "method", *columns):
        table.add_column(name, justify="left" if name in ("task", "method") else "right")
    for before, value in zip([None, *values], values, strict=False):
        if before is not None and before["task"] != value["task"]:
            table.add_section()
        table.add_row(
            value["task"],
            value["method"],
            f"{value['al']:.2f}",
            " / ".join(f"{share:.2f}" for share in value["marginal_acceptance"][:4]),
            f"{value['drafted_per_step']:.1f}",
            f"{value['draft_ms']:.2f}",
            f"{value['target_ms']:.1f}",
            f"{value['tokens_per_s']:.1f}",
            f"{value['ratio_to_plain']:.2f}x",
            "yes" if value["lossless"] else "NO",
        )
    stdout().print(table)


def suffix(
    model: opt.ModelOpt = "smollm2-135m",
    requests: Annotated[
        int,
        typer.Option("--requests", help="Finished requests that fill the pool.", show_default=True, min=1),
    ] = 2000,
    pool_mb: Annotated[
        float, typer.Option("--pool-mb", help="Limit of the pool.", show_default=True, min=1)
    ] = 32,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Cost of the suffix drafter per token by length of history, and the memory of its pool."""
    from foretell.bench import suffix as bench
    from foretell.models.catalog import locate
    from foretell.models.tokenizer import Tokenizer

    result_folder(out)
    with model_progress() as report:
        tokenizer = Tokenizer(locate(model, report))
    tokens = bench.text_tokens(tokenizer, 400_000)
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2 * len(bench.HISTORIES))
        found = list(bench.costs(tokens, lambda: bar.advance(task)))
        fill = bar.add_task("finished requests", total=requests)
        used = bench.memory(tokens, requests, pool_mb, lambda: bar.advance(fill))
    value = {"costs": [cost.to_json() for cost in found], "memory": used.to_json()}
    save(out, "suffix", {"model": model}, value)
    bench.plot(found, out / "suffix.png")
    if as_json:
        print_json(value)
        return
    from rich.table import Table

    table = Table(title="suffix drafter, microseconds per token")
    for name in ("tokens of history", "read", "read + propose"):
        table.add_column(name, justify="right")
    for cost in found:
        table.add_row(str(cost.history), f"{cost.read:.1f}", f"{cost.total:.1f}")
    stdout().print(table)
    stdout().print(
        f"pool after {used.requests} requests: {used.pool / 1e6:.1f} MB of {used.limit / 1e6:.1f} MB, "
        f"the process grew by {used.rss_growth / 1e6:.1f} MB"
    )
