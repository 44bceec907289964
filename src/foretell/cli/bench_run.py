"""`foretell bench run`: methods, tasks, batch sizes and temperatures in one table."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.bench.methods import Foretell, Method
    from foretell.bench.peers import Given
    from foretell.bench.run import Settings
    from foretell.bench.tasks import Prompt


TaskOpt = Annotated[
    list[str] | None,
    typer.Option("--task", help="JSONL file, folder of texts, demo, edit or identity.  [default: demo]"),
]
MethodOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="DRAFTER, DRAFTER@N, or a peer: transformers[:pld|:assistant], "
        "llama.cpp[:draft|:ngram-simple|:ngram-map-k|:ngram-mod|:ngram-cache], openvino[:pld], "
        "vllm[:ngram|:suffix]; plain is always there.  [default: auto]",
    ),
]
BatchOpt = Annotated[list[int] | None, typer.Option("--batch", help="Prompts at once.  [default: 1]", min=1)]
TemperaturesOpt = Annotated[
    list[float] | None, typer.Option("--temperature", "-t", help="0 is greedy.  [default: 0]")
]
PerTaskOpt = Annotated[
    int | None, typer.Option("--per-task", help="Prompts per task.  [default: all]", min=1)
]
AssistantOpt = Annotated[str | None, typer.Option("--assistant", help="Model for transformers:assistant.")]
ModelsOpt = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="As in generate; may be repeated.  [default: smollm2-135m]"),
]
WeightsOpt = Annotated[
    list[str] | None,
    typer.Option("--weights", help="As in generate; several are measured in turn.  [default: stored]"),
]
GgufOpt = Annotated[
    list[Path] | None, typer.Option("--gguf", help="File for llama.cpp and OpenVINO, one per model.")
]
AssistantGgufOpt = Annotated[
    Path | None, typer.Option("--assistant-gguf", help="Draft model's file for llama.cpp:draft.")
]


def run(
    model: ModelsOpt = None,
    task: TaskOpt = None,
    method: MethodOpt = None,
    batch: BatchOpt = None,
    temperature: TemperaturesOpt = None,
    per_task: PerTaskOpt = None,
    max_tokens: opt.MaxTokensOpt = 128,
    repeats: opt.RepeatsOpt = 1,
    weights: WeightsOpt = None,
    device: opt.DeviceOpt = "auto",
    assistant: AssistantOpt = None,
    gguf: GgufOpt = None,
    assistant_gguf: AssistantGgufOpt = None,
    kv_tokens: opt.KvTokensOpt = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Measure methods side by side; an interrupted run goes on where it stopped."""
    from foretell.bench import run as bench
    from foretell.bench import tasks

    result_folder(out)
    kinds = list(dict.fromkeys(weights or ["stored"]))
    models = list(dict.fromkeys(model or ["smollm2-135m"]))
    files = _files(gguf or [], models)
    settings = bench.Settings(tuple(batch or [1]), tuple(temperature or [0.0]), repeats)
    prompts = tasks.load(task or ["demo"], per_task)
    names = list(dict.fromkeys(["plain", *(method or ["auto"])]))
    _check_files(names, assistant, assistant_gguf, bool(gguf))
    wanted = _Wanted(names, kinds, device, max_tokens, kv_tokens, assistant, assistant_gguf)
    rows = [
        {"model": name, **row}
        for name in models
        for row in _measure(out, name, files.get(name), wanted, settings, prompts)
    ]
    _write(out, {"models": models, "weights": kinds, "prompts": len(prompts), "repeats": repeats}, rows)
    if as_json:
        for row in rows:
            print_json(row)
    else:
        for name in models:
            own = [row for row in rows if row["model"] == name]
            _print(f"{name}, {_listed(kinds)} weights, {len(prompts)} prompts", own)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is measured on every model."""

    methods: list[str]
    weights: list[str]
    device: str
    max_tokens: int
    kv_tokens: int | None
    assistant: str | None
    assistant_gguf: Path | None


def _files(given: list[Path], models: list[str]) -> dict[str, Path]:
    """Model -> its .gguf file."""
    found = {name: Path(name) for name in models if name.endswith(".gguf")}
    if given and len(given) != len(models):
        raise InputError(
            f"{len(given)} files are given with --gguf for {len(models)} models",
            hint="give one per --model, in the same order",
        )
    for name, path in zip(models, given, strict=False):
        if not path.is_file():
            raise InputError(f"--gguf: there is no file {path}", hint=f"foretell pull {name} --gguf FOLDER")
        found[name] = path
    return found


def _check_files(names: list[str], assistant: str | None, assistant_gguf: Path | None, gguf: bool) -> None:
    """Warns of options that no method reads.

    Raises:
        InputError: the assistant's file is not there.
    """
    if assistant_gguf is not None and not assistant_gguf.is_file():
        raise InputError(f"--assistant-gguf: there is no file {assistant_gguf}")
    for option, given, readers in (
        ("--assistant", assistant is not None, {"transformers:assistant"}),
        ("--assistant-gguf", assistant_gguf is not None, {"llama.cpp:draft"}),
        ("--gguf", gguf, {name for name in names if name.partition(":")[0] in ("llama.cpp", "openvino")}),
    ):
        if given and not readers & set(names):
            stderr().print(f"{option} has no effect: no method reads it", style="yellow")


def _measure(
    out: Path,
    model: str,
    gguf: Path | None,
    wanted: _Wanted,
    settings: Settings,
    prompts: list[Prompt],
) -> list[dict[str, Any]]:
    """All methods on one model; what is finished is kept in a log of its own."""
    from foretell.api import LLM
    from foretell.bench import run as bench
    from foretell.bench import tasks
    from foretell.bench.methods import Foretell
    from foretell.bench.peers import Given

    with model_progress() as progress:
        llms = {
            kind: LLM(model, drafter="none", weights=kind, device=wanted.device, report=progress)
            for kind in wanted.weights
        }
    llm = llms[wanted.weights[0]]
    items = tasks.encode(llm, prompts, wanted.max_tokens)
    longest = max(len(item.ids) + item.max_tokens for item in items) + 64
    most = max(settings.batches)
    given = Given(llm.loaded, longest, gguf, wanted.assistant, wanted.assistant_gguf)

    def ours(name: str) -> list[Foretell]:
        labels = {kind: kind if len(llms) > 1 else "" for kind in llms}
        room = wanted.kv_tokens or longest * most
        return [Foretell(name, llms[kind], most, room, labels[kind]) for kind in llms]

    methods = _methods(wanted.methods, given, ours)
    facts: dict[str, Any] = {
        "model": model,
        "weights": wanted.weights,
        "tasks": [[item.task, item.id, item.max_tokens] for item in items],
        "methods": [m.name for m in methods],
        "batches": settings.batches,
        "temperatures": settings.temperatures,
        "repeats": settings.repeats,
    }
    log = bench.Log(out / f"run.{Path(model).name}.jsonl", facts)
    total = sum(1 for _ in bench.cells(methods, items, settings))
    with progress_bar() as bar:
        step = bar.add_task(f"{model}: methods in turn", total=total)
        lost = bench.measure(methods, items, settings, log, time.perf_counter, lambda: bar.advance(step))
    for name, reason in lost.items():
        stderr().print(f"skipped {name}: {reason}", style="yellow")
    return bench.summarise(log)


def _write(out: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes run.json, run.md, and a figure per model."""
    from foretell.bench import report

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    save(out, "run", {"peak_memory_bytes": peak, **facts}, rows)
    provenance = json.loads((out / "run.json").read_text(encoding="utf-8"))["provenance"]
    listed = {**provenance, **facts}
    listed |= {name: ", ".join(facts[name]) for name in ("models", "weights")}
    listed["peak memory of the process"] = f"{peak / 1e9:.2f} GB"
    (out / "run.md").write_text(report.markdown(rows, listed), encoding="utf-8")
    for name in facts["models"]:
        own = [row for row in rows if row["model"] == name]
        report.plot(own, out / f"run.{Path(name).name}.png", f"{name}, {_listed(facts['weights'])} weights")


def _listed(weights: list[str]) -> str:
    return " and ".join(weights)


def _methods(names: list[str], given: Given, make: Callable[[str], list[Foretell]]) -> list[Method]:
    from foretell.bench.methods import Unavailable
    from foretell.bench.peers import build

    found: list[Method] = []
    for name in names:
        try:
            found += build(name, given, make)
        except Unavailable as reason:
            stderr().print(f"skipped {name}: {reason}", style="yellow")
    return found


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from foretell.bench.report import COLUMNS, cell

    for batch, temperature in dict.fromkeys((row["batch"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)]
        table = Table(title=f"{title}, batch {batch}, temperature {temperature:g}")
        table.add_column("task")
        for key, name in COLUMNS:
            table.add_column(name, justify="left" if key == "method" else "right", overflow="fold")
        for before, row in zip([None, *own], own, strict=False):
            same = before is not None and before["task"] == row["task"]
            if before is not None and not same:
                table.add_section()
            table.add_row("" if same else row["task"], *(cell(row[key]) for key, _ in COLUMNS))
        stdout().print(table)
