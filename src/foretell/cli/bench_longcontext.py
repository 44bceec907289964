"""`foretell bench longcontext`: what selection policies cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stderr, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save

if TYPE_CHECKING:
    from foretell.bench.longcontext.methods import Method

LengthsOpt = Annotated[
    list[int] | None,
    typer.Option("--lengths", help="Tokens of prompt and answer; repeatable.  [default: 4096]"),
]
DepthsOpt = Annotated[
    int,
    typer.Option("--depths", help="Places of the needle, from beginning to end.", show_default=True, min=1),
]
BudgetOpt = Annotated[
    list[int] | None,
    typer.Option("--budget", help="Tokens that are read; repeatable.  [default: 512, 256, 128]"),
]
PolicyOpt = Annotated[
    list[str] | None,
    typer.Option("--policy", help="As --kv in generate, or oracle; repeatable.  [default: all]"),
]
TaskOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        help="needle, passkey, kv, niah-single, niah-multikey, niah-multivalue, niah-multiquery, variables, "
        "common-words, frequent-words, perplexity; repeatable.  [default: those that a small model can do]",
    ),
]
PerTaskOpt = Annotated[
    int,
    typer.Option("--per-task", help="Prompts per task, length and depth.", show_default=True, min=1),
]
TextOpt = Annotated[
    int, typer.Option("--text", help="Tokens of each book that are scored.", show_default=True, min=1)
]
DraftOpt = Annotated[
    str | None,
    typer.Option("--draft", help="Draft model of the same vocabulary.  [default: the target drafts]"),
]
DraftTokensOpt = Annotated[
    int,
    typer.Option("--draft-tokens", help="Drafted per step; 0 = nobody drafts.", show_default=True, min=0),
]
BooksOpt = Annotated[
    Path | None, typer.Option("--books", help="Folder of .txt files.  [default: texts that Python has]")
]
LongbenchOpt = Annotated[
    Path | None, typer.Option("--longbench", help="Folder of LongBench's .jsonl files, asked too.")
]
SeedOpt = Annotated[int, typer.Option("--seed", help="Another seed, other prompts.", show_default=True)]


def longcontext(
    model: opt.ModelOpt = "smollm2-135m",
    draft: DraftOpt = None,
    draft_tokens: DraftTokensOpt = 4,
    lengths: LengthsOpt = None,
    depths: DepthsOpt = 5,
    budget: BudgetOpt = None,
    policy: PolicyOpt = None,
    task: TaskOpt = None,
    per_task: PerTaskOpt = 1,
    text: TextOpt = 128,
    books: BooksOpt = None,
    longbench: LongbenchOpt = None,
    seed: SeedOpt = 0,
    device: opt.DeviceOpt = "auto",
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Quality of KV selection: retrieval and perplexity of long prompts, every policy and budget against full
    KV; an interrupted run goes on where it stopped.

    Every method decodes for real: a step reads what its policy selected. Drafts are the same for all.
    """
    from foretell.bench.longcontext import run as bench
    from foretell.bench.longcontext.answer import Drafting
    from foretell.bench.longcontext.methods import methods
    from foretell.bench.run import Log
    from foretell.models.load import load_model

    result_folder(out)
    chosen = methods(policy, budget or [512, 256, 128])
    tasks = tuple(dict.fromkeys(task or bench.DEFAULT_TASKS))
    lengths_ = tuple(dict.fromkeys(lengths or [4096]))
    settings = bench.Settings(lengths_, depths, per_task, text, tasks, books, longbench, seed)
    settings.check_tasks()
    _warn_drafting(chosen, draft, draft_tokens)
    _warn_tasks(tasks, {"--depths": depths != 5, "--text": text != 128, "--books": books is not None})
    with model_progress() as report:
        loaded = load_model(model, device=device, report=report)
    settings.check_lengths(loaded.model.max_context)
    asked, read = bench.questions(settings, loaded.tokenizer), bench.passages(settings, loaded.tokenizer)
    facts: dict[str, Any] = {
        "model": model,
        "draft": (draft or "the target, snapkv over 512 tokens") if draft_tokens else "nobody",
        "draft_tokens": draft_tokens,
        "lengths": lengths_,
        "prompts": [question.id for question in asked] + [passage.id for passage in read],
        "methods": [method.name for method in chosen],
        "books": "Python's language reference and argparse.py" if books is None else str(books),
        "seed": seed,
    }
    log = Log(out / f"longcontext.{Path(model).name}.jsonl", {**facts, "text": text})
    with progress_bar() as bar:
        step = bar.add_task("prompts", total=len(asked) + len(read))
        drafting = Drafting(draft, draft_tokens)
        bench.measure(loaded, chosen, drafting, asked, read, log, lambda: bar.advance(step))
    _write(out, facts, list(log.cells.values()), as_json)


def _warn_drafting(chosen: list[Method], draft: str | None, draft_tokens: int) -> None:
    """Says which settings of the draft change nothing."""
    if not draft_tokens:
        if draft is not None:
            stderr().print("--draft has no effect: --draft-tokens is 0", style="yellow")
        if any(method.looks_ahead for method in chosen):
            stderr().print(
                "--draft-tokens is 0: dustin goes by the target's last token alone", style="yellow"
            )


def _warn_tasks(tasks: tuple[str, ...], given: dict[str, bool]) -> None:
    """Says which settings no task reads."""
    readers = {"--depths": {"needle"}, "--text": {"perplexity"}, "--books": {"needle", "perplexity"}}
    for option, its in readers.items():
        if given[option] and not its & set(tasks):
            stderr().print(f"{option} has no effect: it is for {' and '.join(sorted(its))}", style="yellow")


def _write(out: Path, facts: dict[str, Any], cells: list[dict[str, Any]], as_json: bool) -> None:
    """Tables, figures and JSON."""
    from foretell.bench.longcontext import report
    from foretell.bench.longcontext.run import summarise
    from foretell.bench.provenance import provenance

    rows = summarise(cells)
    save(out, "longcontext", facts, rows)
    listed = {**provenance(), **facts, "prompts": len(facts["prompts"]), "methods": len(facts["methods"])}
    (out / "longcontext.md").write_text(report.markdown(rows, listed), encoding="utf-8")
    title = f"{facts['model']}: quality by tokens read"
    report.plot_budgets(rows, out / "longcontext.png", title)
    report.plot_needles(
        cells, out / "longcontext-needle.png", f"{facts['model']}: needle by length and depth"
    )
    if as_json:
        for row in rows:
            print_json(row)
        return
    from rich.table import Table

    for length in dict.fromkeys(row["length"] for row in rows):
        own = [row for row in rows if row["length"] == length]
        tasks = list(dict.fromkeys(row["task"] for row in own))
        table = Table(title=f"{facts['model']}, {length or 'own'} tokens: score (kept of full KV's)")
        for name in ("method", *tasks):
            table.add_column(name, justify="left" if name == "method" else "right")
        for method in dict.fromkeys(row["method"] for row in own):
            found = {row["task"]: report.cell(row) for row in own if row["method"] == method}
            table.add_row(method, *(found.get(task, "-") for task in tasks))
        stdout().print(table)
