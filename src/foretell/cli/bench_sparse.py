"""`foretell bench attention` and `verification`: what reading few keys of a long history saves, and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save

if TYPE_CHECKING:
    from foretell.bench.attention import Choosing, Layout, Reading
    from foretell.bench.verification import Steps
    from foretell.planner.arithmetic import Machine

RowsOpt = Annotated[
    int,
    typer.Option("--rows", help="Rows per request: the last token and a draft.", show_default=True, min=1),
]
BudgetOpt = Annotated[
    int, typer.Option("--kv-budget", help="Keys of the history that are read.", show_default=True, min=4)
]
CellOpt = Annotated[
    list[str] | None,
    typer.Option("--cell", help="CONTEXTxBATCH; repeatable.  [default: 8192x8 16384x8 16384x16 32768x16]"),
]
CELLS = ("8192x8", "16384x8", "16384x16", "32768x16")
KvMemoryOpt = Annotated[
    float,
    typer.Option(
        "--kv-memory",
        help="GB for keys and values; with less than a cell needs, all layers share one layer's.",
        show_default=True,
        min=0,
    ),
]


def attention(
    keys: Annotated[
        int, typer.Option("--keys", help="Longest history, keys per request.", show_default=True, min=64)
    ] = 32768,
    batch: Annotated[int, typer.Option("--batch", help="Requests.", show_default=True, min=1)] = 16,
    heads: Annotated[
        str, typer.Option("--heads", help="QUERY/KEY-VALUE heads / head size.", show_default=True)
    ] = "14/2/64",
    layers: Annotated[
        int, typer.Option("--layers", help="Layers of the model; one is timed.", show_default=True, min=1)
    ] = 24,
    rows: RowsOpt = 5,
    kv_budget: BudgetOpt = 512,
    ahead: Annotated[
        int, typer.Option("--ahead", help="Rows of a draft that look ahead.", show_default=True, min=0)
    ] = 4,
    draft_layers: Annotated[
        int,
        typer.Option("--draft-layers", help="Layers of the draft that are asked.", show_default=True, min=1),
    ] = 1,
    repeats: opt.RepeatsOpt = 5,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Attention over all keys and over a selection, and what selecting costs: random keys, fp32."""
    from foretell.bench import attention as bench
    from foretell.errors import InputError

    result_folder(out)
    layout = bench.Layout(*_heads(heads), layers, batch, rows, kv_budget)
    contexts = [c for shift in range(4, -1, -1) if (c := keys >> shift) > kv_budget]
    if not contexts:
        raise InputError(
            f"keys must be more than kv_budget ({kv_budget}), got {keys}", hint="all of them would be read"
        )
    with progress_bar() as bar:
        task = bar.add_task("attention", total=len(contexts) * (repeats + 1))
        world = bench.World(layout, keys)
        readings = [world.reading(c, repeats, lambda: bar.advance(task)) for c in contexts]
        task = bar.add_task("selecting", total=None)
        chosen = bench.measure_choosing(
            world, readings[-1], repeats, ahead, draft_layers, lambda: bar.advance(task)
        )
    facts = {"layout": layout.to_json(), "ahead": ahead, "draft_layers": draft_layers, "repeats": repeats}
    results = [*(r.to_json() for r in readings), *(c.to_json() for c in chosen)]
    save(out, "attention", facts, results)
    bench.plot(readings, layout, out / "attention.png")
    if as_json:
        for result in results:
            print_json(result)
    else:
        _print(layout, readings, chosen)


def _heads(text: str) -> tuple[int, int, int]:
    """QUERY/KEY-VALUE/SIZE.

    Raises:
        InputError: it has another form, or query heads cannot share key/value heads evenly.
    """
    from foretell.errors import InputError

    parts = text.split("/")
    numbers = [int(part) for part in parts if part.isdecimal() and int(part) > 0]
    if len(parts) != 3 or len(numbers) != 3 or numbers[0] % numbers[1]:
        raise InputError(
            f"heads must be query heads / key-value heads / head size, got {text!r}", hint="such as 14/2/64"
        )
    return numbers[0], numbers[1], numbers[2]


def _print(layout: Layout, readings: list[Reading], chosen: list[Choosing]) -> None:
    from rich.table import Table

    shape = f"{layout.heads}/{layout.kv_heads} heads of {layout.dim}"
    title = f"One layer, {shape}, batch {layout.batch}, {layout.rows} rows, {layout.budget} keys selected: ms"
    table = Table(title=title)
    for name in ("keys", "all", "selected", "all : selected", "torch, heads expanded", "all, one row"):
        table.add_column(name, justify="right")
    for r in readings:
        times = [f"{1000 * t:.1f}" for t in (r.full, r.selected, r.unfolded, r.plain)]
        table.add_row(str(r.context), *times[:2], f"{r.speedup:.1f}x", *times[2:])
    stdout().print(table)
    title = (
        f"Selecting, batch {layout.batch}, against attention over {readings[-1].context} keys in all layers"
    )
    table = Table(title=title)
    for name in ("policy", "heads asked", "ms per step", "of all rows' attention", "of one row's"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for c in chosen:
        shares = [f"{100 * share:.2f} %" for share in (c.share, c.plain_share)]
        table.add_row(c.policy, str(c.asked), f"{1000 * c.seconds:.1f}", *shares)
    stdout().print(table)


def verification(
    model: opt.ModelOpt = "qwen2.5-coder-0.5b",
    cell: CellOpt = None,
    rows: RowsOpt = 5,
    kv: Annotated[str, typer.Option("--kv", help="Which policy selects.", show_default=True)] = "dustin",
    kv_budget: BudgetOpt = 512,
    weights: opt.WeightsOpt = "stored",
    kv_memory: KvMemoryOpt = 4.0,
    al: Annotated[
        float | None, typer.Option("--al", help="Acceptance length: print tokens per second with it.", min=1)
    ] = None,
    draft_ms: Annotated[
        float,
        typer.Option("--draft-ms", help="With --al: drafting of a whole step.", show_default=True, min=0),
    ] = 0.0,
    repeats: opt.RepeatsOpt = 3,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Whole steps behind random long histories: verification over a selection and over all keys, and plain
    decoding's step."""
    from foretell.bench import verification as bench
    from foretell.models.catalog import locate
    from foretell.models.decoder import load_decoder
    from foretell.models.load import compute_dtype, pick_device

    policy = bench.policy_of(kv)
    cells = [bench.Cell(*_cell(text, kv_budget)) for text in cell or CELLS]
    result_folder(out)
    if al is None and draft_ms:
        stderr().print("--draft-ms has no effect without --al", style="yellow")
    with model_progress() as report:
        folder = locate(model, report)
    where = pick_device("cpu")
    target = load_decoder(folder, compute_dtype(where), where, weights=weights)
    machine = bench.measure_machine()
    size, kv_bytes = bench.weight_bytes(folder, target.config, weights), 1e9 * kv_memory
    with progress_bar() as bar:
        task = bar.add_task("steps", total=len(cells) * (repeats + 1))
        results = [
            bench.measure(
                bench.World(target, each, rows, policy, kv_budget, kv_bytes),
                *(machine, size, repeats),
                lambda: bar.advance(task),
            )
            for each in cells
        ]
    values = [{**steps.to_json(), **_speed(steps, al, draft_ms / 1000)} for steps in results]
    speed = {"gb_per_s": round(machine.bandwidth / 1e9, 2), "gflop_per_s": round(machine.flops / 1e9, 1)}
    facts = {"model": model, "weights": weights, "rows": rows, "kv": kv, "kv_budget": kv_budget, **speed}
    save(out, "verification", {**facts, "repeats": repeats}, values)
    bench.plot(results, out / "verification.png", f"{model}: {rows} rows over {kv_budget} keys ({kv})")
    if as_json:
        for value in values:
            print_json(value)
    else:
        _print_steps(f"{model}, {rows} rows, {kv_budget} keys by {kv}", results, values, machine)


def _cell(text: str, budget: int) -> tuple[int, int]:
    """CONTEXTxBATCH.

    Raises:
        InputError: it has another form, or the budget holds all of the context.
    """
    from foretell.errors import InputError

    context, _, batch = text.partition("x")
    if not (context.isdecimal() and batch.isdecimal() and int(batch) > 0):
        raise InputError(f"cell must be CONTEXTxBATCH, got {text!r}", hint="such as 8192x8")
    if int(context) <= budget:
        raise InputError(f"cell {text}: a context must be more than kv_budget ({budget})")
    return int(context), int(batch)


def _speed(steps: Steps, al: float | None, draft_s: float) -> dict[str, object]:
    """Tokens per second of all requests together, plain and speculative, where an acceptance length is given;
    and which one makes four times plain's."""
    needed: dict[str, object] = {"al_for_4x": round(steps.al_for_goal(draft_s), 2)}
    if al is None:
        return needed
    plain, own = steps.cell.batch / steps.plain, steps.tokens_per_s(al, draft_s)
    rates = {"plain_tokens_per_s": round(plain, 2), "tokens_per_s": round(own, 2)}
    return {**needed, "al": al, "draft_ms": 1000 * draft_s, **rates, "speedup": round(own / plain, 3)}


def _print_steps(title: str, results: list[Steps], values: list[dict[str, object]], machine: Machine) -> None:
    from rich.table import Table

    table = Table(title=f"{title}: ms per step")
    names = ["context x batch", "plain", "full", "sparse", "selecting", "plain : sparse", "full : sparse"]
    names += ["layers' memory", "AL for 4x"]
    if "al" in values[0]:
        names += ["plain tok/s", f"tok/s at AL {values[0]['al']}", "speedup"]
    for name in names:
        table.add_column(name, justify="right")
    for steps, value in zip(results, values, strict=True):
        times = [f"{1000 * t:.0f}" for t in (steps.plain, steps.classic, steps.sparse, steps.selecting)]
        plain, full, sparse = steps.roofline
        ratios = [
            f"{steps.to_plain:.2f} ({plain / sparse:.2f})",
            f"{steps.to_classic:.2f} ({full / sparse:.2f})",
        ]
        row = [str(steps.cell), *times, *ratios, "own" if steps.layers_kept > 1 else "shared"]
        row += [
            str(value[name])
            for name in ("al_for_4x", "plain_tokens_per_s", "tokens_per_s", "speedup")
            if name in value
        ]
        table.add_row(*row)
    stdout().print(table)
    speed = f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s, measured"
    stdout().print(f"in brackets: the ratio by bytes and FLOPs, with {speed}")
