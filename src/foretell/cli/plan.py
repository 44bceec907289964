"""`foretell plan`: what speculation can be worth, by arithmetic, and with a machine's own numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli import plan_ring
from foretell.cli.console import model_progress, print_json, stderr, stdout
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.planner.arithmetic import Speculation

app = typer.Typer(name="plan", invoke_without_command=True)
app.command()(plan_ring.ring)
_LENGTHS = 16
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@app.callback()
def plan(
    ctx: typer.Context,
    p: Annotated[float, typer.Option("--p", help="Acceptance of a draft token.", show_default=True)] = 0.8,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", help="Cost of a verified row, in plain steps.  [default: 0.1, or measured]"),
    ] = None,
    draft_cost: Annotated[
        float,
        typer.Option("--draft-cost", help="Cost of a drafted token, in plain steps.", show_default=True),
    ] = 0.0,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Measure this model on this machine.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of the KV cache.  [default: the model's]", min=1)
    ] = None,
    tflops: Annotated[
        float | None, typer.Option("--tflops", help="Device: 10^12 operations per second.", min=0.001)
    ] = None,
    memory_gbs: Annotated[
        float | None, typer.Option("--memory-gbs", help="Device: 10^9 bytes per second from memory.", min=0.1)
    ] = None,
    link_gbs: Annotated[
        float | None, typer.Option("--link-gbs", help="Between devices: 10^9 bytes per second.", min=0.001)
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Query heads, for --link-gbs.  [default: 32]", min=1)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key/value heads, for --link-gbs.  [default: 8]", min=1)
    ] = None,
    device: opt.DeviceOpt = "auto",
    out: Annotated[Path, typer.Option("--out", help="Folder for the PNG.", show_default=True)] = Path(
        "results"
    ),
    as_json: opt.JsonOpt = False,
) -> None:
    """Show how speedup depends on draft length, what is best, and what bounds it."""
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from foretell.planner.arithmetic import Speculation

    _check(model, context, device, tflops, memory_gbs, link_gbs, heads, kv_heads)
    facts: dict[str, Any] = {}
    if model is not None:
        facts = _measured(model, context, device)
        alpha = facts["measured"]["alpha"] if alpha is None else alpha
    speculation = Speculation(p, 0.1 if alpha is None else alpha, draft_cost)
    value = {**_answer(speculation), **facts, **_device(speculation, tflops, memory_gbs)}
    if link_gbs is not None and tflops is not None:
        value["ring"] = _ring(tflops, link_gbs, heads or 32, kv_heads or 8)
    _plot(speculation, out)
    if as_json:
        print_json(value)
    else:
        _print(speculation, value)


def _refuse_options(ctx: typer.Context) -> None:
    """What stands before a sub-command would have no effect."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{param.opts[0]} has no effect before {ctx.invoked_subcommand!r}")


def _check(
    model: str | None,
    context: int | None,
    device: str,
    tflops: float | None,
    memory_gbs: float | None,
    link_gbs: float | None,
    heads: int | None,
    kv_heads: int | None,
) -> None:
    """Every option must have what it needs to have an effect."""
    for name, value in (("tflops", tflops), ("memory_gbs", memory_gbs), ("link_gbs", link_gbs)):
        if value is not None and not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, got {value}")
    needs = (
        ("memory_gbs", memory_gbs is not None, "tflops", tflops is not None),
        ("link_gbs", link_gbs is not None, "tflops", tflops is not None),
        ("tflops", tflops is not None, "memory_gbs or link_gbs", bool(memory_gbs or link_gbs)),
        ("heads", heads is not None, "link_gbs", link_gbs is not None),
        ("kv_heads", kv_heads is not None, "link_gbs", link_gbs is not None),
        ("context", context is not None, "model", model is not None),
        ("device", device != "auto", "model", model is not None),
    )
    for name, given, other, there in needs:
        if given and not there:
            raise InputError(f"{name} has no effect without {other}", hint=f"give {other} too")
    if (heads or 32) % (kv_heads or 8):
        raise InputError(f"kv_heads must divide heads ({heads or 32}), got {kv_heads or 8}")


def _answer(speculation: Speculation) -> dict[str, Any]:
    best = speculation.best_n()
    asymptote = speculation.asymptote()
    return {
        "p": speculation.p,
        "alpha": speculation.alpha,
        "draft_cost": speculation.draft_cost,
        "best_n": best,
        "speedup": round(speculation.speedup(best), 4),
        "asymptote": round(asymptote, 4) if asymptote < float("inf") else None,
        "by_n": {n: round(speculation.speedup(n), 4) for n in range(1, _LENGTHS + 1)},
    }


def _measured(model: str, context: int | None, device: str) -> dict[str, Any]:
    """Step times of the model here, its weights and its KV cache."""
    from foretell.models.catalog import locate
    from foretell.models.config import read_config
    from foretell.models.load import load_model
    from foretell.models.weights import Checkpoint
    from foretell.planner.arithmetic import kv_bytes, weight_reads
    from foretell.planner.cost import measure

    with model_progress() as report:
        folder = locate(model, report)
        loaded = load_model(str(folder), device=device)
    table = measure(loaded.model)
    size = sum(count for _, count in Checkpoint(folder).sizes().values())
    config = read_config(folder)
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    width = int(config.get("num_key_value_heads") or heads) * int(
        config.get("head_dim") or config["hidden_size"] // heads
    )
    tokens = context or loaded.model.max_context
    plain, speculative = weight_reads(5, size, 0)
    return {
        "model": model,
        "measured": {
            "step_ms": {r: round(1000 * s, 2) for r, s in table.seconds.items()},
            "alpha": table.alpha(8),
        },
        "weights_bytes": size,
        "weight_reads_of_5_tokens": {"plain": plain, "one_verification": speculative},
        "kv": {"context": tokens, "bytes": kv_bytes(layers, tokens, width, loaded.model.dtype.itemsize)},
    }


def _device(speculation: Speculation, tflops: float | None, memory_gbs: float | None) -> dict[str, Any]:
    """Where verification becomes bound by computing on a device of these measures."""
    from foretell.planner.arithmetic import Machine

    if tflops is None or memory_gbs is None:
        return {}
    machine = Machine(memory_gbs * 1e9, tflops * 1e12)
    batches = {}
    for batch in _BATCHES:
        best = max(
            (replace(speculation, alpha=machine.alpha(batch, n, 2)).speedup(n), -n) for n in range(1, 17)
        )
        batches[batch] = {"best_n": -best[1] if best[0] > 1 else 0, "speedup": round(max(1.0, best[0]), 3)}
    return {"free_rows": round(machine.free_rows(2), 1), "by_batch": batches}


def _ring(tflops: float, link_gbs: float, heads: int, kv_heads: int) -> dict[str, Any]:
    from foretell.planner.arithmetic import ring_overlap_tokens

    tokens = ring_overlap_tokens(tflops * 1e12, link_gbs * 1e9, heads, kv_heads, 2)
    return {"tokens_per_device_at_least": round(tokens), "heads": heads, "kv_heads": kv_heads}


def _plot(speculation: Speculation, out: Path) -> None:
    from foretell.bench.plots import figure

    fig, axis = figure(
        f"speedup by draft length (alpha {speculation.alpha:.3g}, draft {speculation.draft_cost:.3g})"
    )
    lengths = range(_LENGTHS + 1)
    for p in sorted({0.5, 0.7, 0.9, speculation.p}):
        own = replace(speculation, p=p)
        width = 2.5 if p == speculation.p else 1.0
        axis.plot(lengths, [own.speedup(n) for n in lengths], marker=".", linewidth=width, label=f"p = {p:g}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlabel("drafted tokens N")
    axis.set_ylabel("speedup over plain decoding")
    axis.legend()
    try:
        out.mkdir(parents=True, exist_ok=True)
        fig.savefig(out / "plan.png")
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror}", hint="choose another folder with --out"
        ) from error
    stderr().print(f"wrote {out / 'plan.png'}", style="dim")


def _print(speculation: Speculation, value: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"p {speculation.p:g}, alpha {speculation.alpha:.3g}, draft cost {speculation.draft_cost:g}"
    )
    table.add_column("N", justify="right")
    table.add_column("tokens per step", justify="right")
    table.add_column("speedup", justify="right")
    from foretell.planner.arithmetic import expected_tokens

    for n, speedup in value["by_n"].items():
        mark = " *" if n == value["best_n"] else ""
        table.add_row(str(n), f"{expected_tokens(speculation.p, n):.2f}", f"{speedup:.2f}x{mark}")
    console = stdout()
    console.print(table)
    bound = "none" if value["asymptote"] is None else f"{value['asymptote']:.2f}x"
    console.print(f"best N {value['best_n']}: {value['speedup']:.2f}x; bound as p tends to 1: {bound}")
    if "measured" in value:
        steps = ", ".join(f"{rows}: {ms}" for rows, ms in value["measured"]["step_ms"].items())
        console.print(f"measured ms by rows: {steps}")
        reads = value["weight_reads_of_5_tokens"]
        console.print(
            f"weights read for 5 tokens: {reads['plain'] / 1e9:.2f} GB plainly, "
            f"{reads['one_verification'] / 1e9:.2f} GB in one verification"
        )
        kv = value["kv"]
        console.print(f"KV cache of {kv['context']} tokens: {kv['bytes'] / 1e9:.3f} GB")
    if "by_batch" in value:
        console.print(f"rows that are free on this device: {value['free_rows']:.0f}")
        for batch, found in value["by_batch"].items():
            console.print(f"  batch {batch}: best N {found['best_n']}, {found['speedup']:.2f}x")
    if "ring" in value:
        least = value["ring"]["tokens_per_device_at_least"]
        console.print(f"ring attention hides its transfers from {least} tokens per device on")
