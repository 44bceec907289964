"""`foretell bench serve`: concurrent streams of a server against one answer after the other."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.bench.items import Item
    from foretell.bench.serve import Contender

TasksOpt = Annotated[
    list[str] | None, typer.Option("--task", help="As in `bench run`; repeatable.  [default: demo]")
]
PerTaskOpt = Annotated[
    int | None, typer.Option("--per-task", help="Prompts per task.  [default: all]", min=1)
]
StreamsOpt = Annotated[
    int, typer.Option("--streams", help="Streams at once, and slots.", show_default=True, min=1)
]
DraftersOpt = Annotated[
    list[str] | None, typer.Option("--drafter", help="Of the server; one server each.  [default: auto]")
]
LongestOpt = Annotated[
    int, typer.Option("--max-tokens", help="Longest answer; others are shorter.", show_default=True, min=4)
]
GgufOpt = Annotated[
    Path | None, typer.Option("--gguf", help="The model's file for llama.cpp's server, where installed.")
]


def serve(
    model: opt.ModelOpt = "smollm2-135m",
    task: TasksOpt = None,
    per_task: PerTaskOpt = None,
    streams: StreamsOpt = 16,
    max_tokens: LongestOpt = 128,
    drafter: DraftersOpt = None,
    weights: opt.WeightsOpt = "stored",
    gguf: GgufOpt = None,
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Measure a server's streams against plain decoding one by one, and llama.cpp's server."""
    from foretell.api import LLM
    from foretell.bench import serve as bench
    from foretell.bench import tasks

    result_folder(out)
    if gguf is not None and not gguf.is_file():
        raise InputError(f"--gguf: there is no file {gguf}", hint=f"foretell pull {model} --gguf FOLDER")
    with model_progress() as report:
        llm = LLM(model, drafter="none", weights=weights, report=report)
    items = bench.mixed(tasks.encode(llm, tasks.load(task or ["demo"], per_task), max_tokens))
    names = list(dict.fromkeys(drafter or ["auto"]))
    with ExitStack() as stack:
        contenders: list[Contender] = [bench.Sequential(llm)]
        contenders += _servers(stack, llm, items, model, weights, streams, names)
        contenders += _llama(stack, items, gguf, streams)
        with progress_bar() as bar:
            step = bar.add_task("groups", total=len(contenders) * -(-len(items) // streams))
            found = bench.measure(contenders, items, streams, lambda: bar.advance(step))
    rows = bench.summarise(contenders, found)
    facts: dict[str, Any] = {"model": model, "weights": weights, "prompts": len(items), "streams": streams}
    facts["max_tokens"] = max_tokens
    save(out, "serve", facts, rows)
    _write(out, facts, rows)
    if as_json:
        for row in rows:
            print_json(row)
    else:
        _print(rows)


def _servers(
    stack: ExitStack,
    llm: LLM,
    items: list[Item],
    model: str,
    weights: str,
    streams: int,
    names: list[str],
) -> list[Contender]:
    from foretell.bench.serve import Streams, process

    room = streams * (max(len(item.ids) + item.max_tokens for item in items) + 64)
    found: list[Contender] = []
    for name in names:
        options = ["--model", model, "--weights", weights, "--drafter", name, "--kv-tokens", str(room)]
        options += ["--port", "0", "--max-batch", str(streams)]
        address = stack.enter_context(process("foretell", "serve", *options))
        served = Path(model).name if Path(model).exists() else model
        found.append(Streams(f"serve, {name}, {streams} streams", address, served, {}))
    return found


def _llama(stack: ExitStack, items: list[Item], gguf: Path | None, streams: int) -> list[Contender]:
    """llama.cpp's server with as many slots and threads."""
    import torch

    from foretell.bench.methods import Unavailable
    from foretell.bench.serve import Streams, process

    if gguf is None:
        return []
    context = max(len(item.ids) + item.max_tokens for item in items) + 64
    numbers = [str(number) for number in (streams, context, torch.get_num_threads())]
    try:
        if importlib.util.find_spec("xllamacpp") is None:
            raise Unavailable("xllamacpp is not installed")
        address = stack.enter_context(process("foretell.bench.llama_server", str(gguf), *numbers))
    except Unavailable as reason:
        stderr().print(f"skipped llama.cpp: {reason}", style="yellow")
        return []
    name = f"llama.cpp, {streams} streams"
    return [Streams(name, address, gguf.name, {"cache_prompt": False})]


def _write(out: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    import json

    from foretell.bench.serve import markdown

    provenance = json.loads((out / "serve.json").read_text(encoding="utf-8"))["provenance"]
    (out / "serve.md").write_text(markdown(rows, {**provenance, **facts}), encoding="utf-8")


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from foretell.bench.report import cell
    from foretell.bench.serve import COLUMNS

    table = Table()
    for key, name in COLUMNS:
        table.add_column(name, justify="left" if key == "method" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row[key]) for key, _ in COLUMNS))
    stdout().print(table)
