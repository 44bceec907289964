"""`foretell bench run`: methods, tasks, batch sizes and temperatures in one table."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.bench.methods import Method
    from foretell.bench.run import Log


TaskOpt = Annotated[
    list[str] | None,
    typer.Option("--task", help="JSONL file, folder of texts, demo, edit or identity.  [default: demo]"),
]
MethodOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="DRAFTER, DRAFTER@N, transformers[:pld|:assistant]; plain is always there.  [default: auto]",
    ),
]
BatchOpt = Annotated[list[int] | None, typer.Option("--batch", help="Prompts at once.  [default: 1]", min=1)]
TemperaturesOpt = Annotated[
    list[float] | None, typer.Option("--temperature", "-t", help="0 is greedy.  [default: 0]")
]
PerTaskOpt = Annotated[
    int | None, typer.Option("--per-task", help="Prompts per task.  [default: all]", min=1)
]
RepeatsOpt = Annotated[int, typer.Option("--repeats", help="Repetitions.", show_default=True, min=1)]
AssistantOpt = Annotated[str | None, typer.Option("--assistant", help="Model for transformers:assistant.")]


def run(
    model: opt.ModelOpt = "smollm2-135m",
    task: TaskOpt = None,
    method: MethodOpt = None,
    batch: BatchOpt = None,
    temperature: TemperaturesOpt = None,
    per_task: PerTaskOpt = None,
    max_tokens: opt.MaxTokensOpt = 128,
    repeats: RepeatsOpt = 1,
    weights: opt.WeightsOpt = "stored",
    device: opt.DeviceOpt = "auto",
    assistant: AssistantOpt = None,
    kv_tokens: opt.KvTokensOpt = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Measure methods side by side; an interrupted run goes on where it stopped."""
    from foretell.api import LLM
    from foretell.bench import run as bench
    from foretell.bench import tasks

    result_folder(out)
    names = list(dict.fromkeys(["plain", *(method or ["auto"])]))
    settings = bench.Settings(tuple(batch or [1]), tuple(temperature or [0.0]), repeats)
    prompts = tasks.load(task or ["demo"], per_task)
    with model_progress() as progress:
        llm = LLM(model, drafter="none", weights=weights, device=device, report=progress)
    items = tasks.encode(llm, prompts, max_tokens)
    longest = max(len(item.ids) + item.max_tokens for item in items) + 64
    methods = _methods(
        names, llm, max(settings.batches), kv_tokens or longest * max(settings.batches), assistant
    )
    facts: dict[str, Any] = {
        "model": model,
        "weights": weights,
        "tasks": [[item.task, item.id, item.max_tokens] for item in items],
        "methods": [m.name for m in methods],
        "batches": settings.batches,
        "temperatures": settings.temperatures,
        "repeats": repeats,
    }
    log = bench.Log(out / "run.jsonl", facts)
    total = sum(1 for _ in bench.cells(methods, items, settings))
    with progress_bar() as bar:
        step = bar.add_task("methods in turn", total=total)
        bench.measure(methods, items, settings, log, time.perf_counter, lambda: bar.advance(step))
    rows = _write(out, facts, log)
    if as_json:
        for row in rows:
            print_json(row)
    else:
        _print(f"{model}, {weights} weights, {len(items)} prompts", rows)


def _write(out: Path, facts: dict[str, Any], log: Log) -> list[dict[str, Any]]:
    """Summarises a measurement into run.json, run.md and run.png."""
    from foretell.bench import report
    from foretell.bench.run import summarise

    rows = summarise(log)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    save(out, "run", {"peak_memory_bytes": peak, **facts}, rows)
    provenance = json.loads((out / "run.json").read_text(encoding="utf-8"))["provenance"]
    listed = {name: facts[name] for name in ("model", "weights", "repeats")}
    listed |= {"prompts": len(facts["tasks"]), "peak memory of the process": f"{peak / 1e9:.2f} GB"}
    (out / "run.md").write_text(report.markdown(rows, {**provenance, **listed}), encoding="utf-8")
    report.plot(rows, out / "run.png", f"{facts['model']}, {facts['weights']} weights")
    return rows


def _methods(
    names: list[str], llm: LLM, max_batch: int, kv_tokens: int, assistant: str | None
) -> list[Method]:
    from foretell.bench.methods import Unavailable, build

    found: list[Method] = []
    for name in names:
        try:
            found.append(build(name, llm, max_batch, kv_tokens, assistant))
        except Unavailable as reason:
            stderr().print(f"skipped {name}: {reason}", style="yellow")
    if not found:
        raise InputError("no method is left to measure")
    return found


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from foretell.bench.report import cell

    table = Table(title=title)
    columns = (
        "batch",
        "temperature",
        "task",
        "method",
        "tokens_per_s",
        "ratio_to_plain",
        "al",
        "tokens_per_step",
    )
    for name in (*columns, "overhead_c", "ttft_s", "itl_ms", "lossless"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("task", "method") else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["task"] != row["task"]:
            table.add_section()
        table.add_row(*(cell(row[name]) for name in (*columns, "overhead_c", "ttft_s", "itl_ms", "lossless")))
    stdout().print(table)
