"""`foretell bench`: measurements, each with what is needed to repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import (
    bench_adapt,
    bench_drafters,
    bench_longcontext,
    bench_ring,
    bench_run,
    bench_serve,
    bench_sparse,
    bench_weights,
)
from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.bench.identity import Check

app = typer.Typer(
    name="bench", help="Measure: step times, drafters, code editing, token identity.", no_args_is_help=True
)

app.command()(bench_drafters.drafters)
app.command()(bench_drafters.suffix)
app.command()(bench_weights.weights)
app.command()(bench_run.run)
app.command()(bench_adapt.adapt)
app.command()(bench_sparse.attention)
app.command()(bench_sparse.verification)
app.command()(bench_longcontext.longcontext)
app.command()(bench_ring.ring)
app.command()(bench_serve.serve)


@app.command()
def step(
    model: opt.ModelOpt = "smollm2-135m",
    context: Annotated[
        int, typer.Option("--context", help="Tokens before the step.", show_default=True, min=1)
    ] = 128,
    repeats: opt.RepeatsOpt = 20,
    device: opt.DeviceOpt = "cpu",
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Time of a step by verified rows: our decoder and transformers, same weights; fp32 arithmetic on the
    CPU, bf16 on CUDA."""
    from foretell.bench import step as bench
    from foretell.models.catalog import locate
    from foretell.models.decoder import load_decoder
    from foretell.models.load import compute_dtype, pick_device

    result_folder(out)
    with model_progress() as report:
        folder = locate(model, report)
    where = pick_device(device)
    dtype = compute_dtype(where)
    steps = {
        "foretell, stored weights": bench.own_step(load_decoder(folder, dtype, where), context),
        "foretell, fp32 weights": bench.own_step(load_decoder(folder, dtype, where, weights="fp32"), context),
        "transformers": bench.transformers_step(folder, context, dtype, where),
    }
    with progress_bar() as bar:
        task = bar.add_task("timing steps", total=repeats + 2)
        results = bench.measure(steps, repeats, lambda: bar.advance(task))
    facts = {"model": model, "context": context, "repeats": repeats}
    value = [r.to_json(beside=results[-1]) for r in results]
    save(out, "step", facts, value)
    bench.plot(results, out / "step.png", f"{model}: one step behind {context} tokens")
    if as_json:
        print_json(value)
        return
    from rich.table import Table

    table = Table(title=f"{model}, {context} tokens of context, ms per step (median of {repeats})")
    table.add_column("rows verified")
    for name in (*map(str, bench.ROWS), "8 : 1", "plain speed"):
        table.add_column(name, justify="right")
    for r in results:
        times = [f"{1000 * r.seconds[n]:.1f}" for n in bench.ROWS]
        table.add_row(r.name, *times, f"{r.ratio(8):.2f}", f"{results[-1].seconds[1] / r.seconds[1]:.2f}x")
    stdout().print(table)


@app.command()
def edit(
    ctx: typer.Context,
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    drafter_opt: opt.DrafterOptOpt = None,
    draft_tokens: opt.DraftTokensOpt = None,
    max_tokens: opt.MaxTokensOpt = 512,
    repeats: opt.RepeatsOpt = 1,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Plain against speculative on "return this function with one change", five functions."""
    from foretell.api import LLM
    from foretell.bench.compare import compare, summarise
    from foretell.bench.items import single_turn
    from foretell.cli.demo import speed_table
    from foretell.types import SamplingParams

    result_folder(out)
    llm = opt.load_llm(ctx.params)
    methods = {"plain": LLM(llm.loaded, drafter="none"), drafter: llm}
    items = single_turn("edit", llm, max_tokens)
    with progress_bar() as bar:
        task = bar.add_task("plain and speculative, in turn", total=len(items) * 2 * repeats)
        runs = compare(methods, items, SamplingParams(), repeats, lambda run: bar.advance(task))
    rows = summarise(runs)
    facts = {"model": model, "max_tokens": max_tokens, "draft_tokens": draft_tokens, "repeats": repeats}
    save(out, "edit", {**facts, "runs": [run.to_json() for run in runs]}, [row.to_json() for row in rows])
    if as_json:
        for row in rows:
            print_json(row.to_json())
    else:
        stdout().print(speed_table(f"{model}, greedy, up to {max_tokens} tokens", rows))


@app.command()
def identity(
    model: opt.ModelOpt = "smollm2-135m",
    draft: Annotated[str | None, typer.Option("--draft", help="Draft model to check beside ngram.")] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", help="Of the 20 prompts.", show_default=True, min=1, max=20)
    ] = 20,
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="Check this policy below a full pass instead; repeatable."),
    ] = None,
    kv_budget: opt.KvBudgetOpt = None,
    length: Annotated[
        int | None, typer.Option("--length", help="Long prompts, of so many tokens, instead.", min=8)
    ] = None,
    max_tokens: opt.MaxTokensOpt = 64,
    draft_tokens: opt.DraftTokensOpt = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Check that every answer equals plain decoding's: greedy and seeded, batch 1 and 4, prefix hits.

    Exits with 1 if one differs.
    """
    from foretell.api import DEFAULT_KV_TOKENS, LLM
    from foretell.bench.identity import SETTINGS, check_identity
    from foretell.bench.items import conversations, passages

    result_folder(out)
    if kv_budget is not None and not kv:
        stderr().print("--kv-budget has no effect: no --kv is given", style="yellow")
    if kv and length is None:
        stderr().print("without --length, prompts that fit the budget are read whole", style="yellow")
    room = max(DEFAULT_KV_TOKENS, 5 * ((length or 0) + max_tokens + 64))
    with model_progress() as report:
        plain = LLM(model, drafter="none", kv_tokens=room, report=report)
    if length is None:
        items = conversations("identity", plain, max_tokens, prompts)
    else:
        items = passages(plain, max_tokens, prompts, length)
    given: dict[str, Any] = {"draft_tokens": draft_tokens, "kv_tokens": room}
    methods = {}
    for name in ["ngram", *([] if draft is None else [f"draft:{draft}"])]:
        for policy in kv or ["full"]:
            below: dict[str, Any] = {"kv": policy, "kv_budget": kv_budget, "lossless": True}
            label = name if policy == "full" else f"{name} below {policy}"
            methods[label] = LLM(plain.loaded, drafter=name, **given, **({} if policy == "full" else below))
    total = len(SETTINGS) * len(items) * (1 + 2 * len(methods))
    with progress_bar() as bar:
        task = bar.add_task("answers", total=total)
        checks = check_identity(plain, methods, items, lambda: bar.advance(task))
    facts = {"model": model, "max_tokens": max_tokens, "row_exact": plain.loaded.model.row_exact}
    save(out, "identity", facts, [check.to_json() for check in checks])
    if as_json:
        for check in checks:
            print_json(check.to_json())
    else:
        _print_checks(plain, checks)
    if any(check.differences for check in checks):
        raise typer.Exit(1)


def _print_checks(plain: LLM, checks: list[Check]) -> None:
    from rich.table import Table

    table = Table(title=f"{plain.loaded.name}: answers equal to plain decoding's")
    for name in ("method", "setting", "batch", "answers", "tokens", "prefix hits", "AL", "identical"):
        table.add_column(name, justify="left" if name in ("method", "setting") else "right")
    for c in checks:
        same = "yes" if not c.differences else f"NO ({len(c.differences)} differ)"
        table.add_row(
            c.method,
            c.setting,
            str(c.batch),
            str(c.answers),
            str(c.tokens),
            str(c.reused),
            f"{c.al:.2f}",
            same,
        )
    stdout().print(table)
    for c in checks:
        for d in c.differences:
            stderr().print(f"{c.method}, {c.setting}, batch {c.batch}: {d}")
