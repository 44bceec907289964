"""`foretell profile`: finds the layers and heads that `--kv dustin` goes by."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, named_progress, print_json, stderr, stdout
from foretell.cli.results import result_folder
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.models.catalog import Report
    from foretell.models.load import LoadedModel
    from foretell.profiling import Outcome, Settings

OUT = Path("results/profile.json")


def profile(
    target: Annotated[
        str, typer.Option("--target", help="Model that verifies; as in generate.", show_default=True)
    ] = "smollm2-135m",
    draft: Annotated[
        str | None, typer.Option("--draft", help="Model that looks ahead.  [default: the target itself]")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="JSONL prompts or a text file.  [default: what comes with Python]"),
    ] = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of a trace.", show_default=True)] = 2048,
    traces: Annotated[
        int, typer.Option("--traces", help="Needles, and as many prompts.", show_default=True)
    ] = 8,
    blocks: Annotated[
        int, typer.Option("--blocks", help="Verifications per prompt, of 5 tokens.", show_default=True)
    ] = 8,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", help="KV budget to search for; repeatable.  [default: 128, 256, 512]"),
    ] = None,
    heads: Annotated[
        int, typer.Option("--heads", help="Retrieval heads per layer; 0 is all heads.", show_default=True)
    ] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the needles.", show_default=True)] = 0,
    weights: opt.WeightsOpt = "stored",
    device: opt.DeviceOpt = "auto",
    as_json: opt.JsonOpt = False,
    out: Annotated[Path, typer.Option("--out", help="Profile to write.", show_default=True)] = OUT,
) -> None:
    """Find the heads that dustin asks; an interrupted search goes on where it stopped."""
    from foretell.profiling import Settings
    from foretell.profiling.report import plot

    budgets = tuple(sorted(set(budget or (128, 256, 512))))
    settings = Settings(length, traces, blocks, budgets, heads, seed, data)
    if out.suffix != ".json":
        raise InputError(f"out must be a .json file, got {out}")
    result_folder(out.parent)
    with model_progress() as report:
        models = _load([target] if draft is None else [target, draft], device, weights, report)
    outcome = _find(models, settings, weights, out.with_suffix(".traces"))
    outcome.profile.write(out)
    plot(outcome, out.with_suffix(".png"))
    stderr().print(f"wrote {out} and {out.with_suffix('.png')}", style="dim")
    if as_json:
        print_json({**outcome.profile.to_json(), "arr_searched": outcome.searched, "right": outcome.right})
    else:
        _print(outcome)


def _find(models: list[LoadedModel], settings: Settings, weights: str, folder: Path) -> Outcome:
    """The search with its progress; what is finished lies in `folder`."""
    from foretell.bench.provenance import provenance
    from foretell.profiling import find
    from foretell.profiling.run import AIM, State

    facts = {name: str(value) for name, value in asdict(settings).items()}
    state = State(
        folder, {"models": [loaded.name for loaded in models], "weights": weights, "aim": AIM, **facts}
    )
    known = provenance()
    machine = f"{known['cores']} cores of {known['cpu']}, {weights} weights"
    origin = {"command": known["command"], "date": known["date"], "machine": machine}
    with named_progress() as advance:
        draft = models[1] if len(models) > 1 else None
        return find(models[0], draft, settings, state, advance, origin)


def _load(names: list[str], device: str, weights: str, report: Report) -> list[LoadedModel]:
    from foretell.models.load import load_model

    if len(set(names)) < len(names):
        raise InputError(f"draft is the target ({names[0]})", hint="leave out --draft: it drafts for itself")
    return [load_model(name, device=device, weights=weights, report=report) for name in names]


def _print(outcome: Outcome) -> None:
    from rich.table import Table

    found = outcome.profile
    stdout().print(f"target layer {found.target_heads.layer}, heads {_listed(found.target_heads.heads)}")
    for chosen in found.draft_heads:
        stdout().print(f"draft layer {chosen.layer}, heads {_listed(chosen.heads)}")
    for role, (right, count) in outcome.right.items():
        stdout().print(f"{role}: {right} of {count} needles answered rightly")
    arr = outcome.judged or outcome.searched
    where = "prompts that the search has not seen" if outcome.judged else "the searched prompts"
    table = Table(title=f"attention recovery rate on {where}")
    table.add_column("selection")
    for budget in arr:
        table.add_column(f"k = {budget}", justify="right")
    for name in next(iter(arr.values())):
        table.add_row(name, *(f"{row[name]:.4f}" for row in arr.values()))
    table.add_row("look-ahead's share", *(f"{found.lookahead[budget]:g}" for budget in arr))
    stdout().print(table)


def _listed(heads: tuple[int, ...] | None) -> str:
    return "all" if heads is None else ", ".join(map(str, heads))
