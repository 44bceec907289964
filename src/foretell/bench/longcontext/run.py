"""The whole suite: which tasks there are, what is measured, and what comes out per task and method. Goes on
where it was interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.bench.longcontext import longbench, needles, ruler
from foretell.bench.longcontext.answer import Drafting, Outcome, Runner
from foretell.bench.longcontext.corpus import Book, books
from foretell.bench.longcontext.methods import Method
from foretell.bench.longcontext.questions import Question
from foretell.bench.run import Log
from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.models.tokenizer import Tokenizer

NEEDLE, PERPLEXITY = "needle", "perplexity"
_DRAWN = {**needles.TASKS, **ruler.TASKS}
TASKS = (NEEDLE, *_DRAWN, PERPLEXITY)
# what SmolLM2-135M can do with all keys; the others measure its limits more than a policy's
DEFAULT_TASKS = (NEEDLE, "passkey", "kv", "niah-single", "niah-multivalue", "variables", PERPLEXITY)
_LEAST = 256  # tokens of a prompt that can hold a task


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Args:
        lengths: tokens of a prompt with its answer.
        depths: places of the needle.
        per_task: questions per task and length (per depth for the needle), and per LongBench task.
        text: tokens of each book that are scored.
        tasks: of `TASKS`.
        books, longbench: folders.
    """

    lengths: tuple[int, ...]
    depths: int
    per_task: int
    text: int
    tasks: tuple[str, ...]
    books: Path | None = None
    longbench: Path | None = None
    seed: int = 0

    def check_tasks(self) -> None:
        """Before a model is loaded.

        Raises:
            InputError: an unknown task.
        """
        for task in self.tasks:
            if task not in TASKS:
                raise InputError(f"unknown --task {task!r}", hint=f"one of: {', '.join(TASKS)}")

    def check_lengths(self, context: int) -> None:
        """Compares with what the model can read.

        Raises:
            InputError: a length is too short or exceeds the context.
        """
        for length in self.lengths:
            if not _LEAST <= length <= context:
                raise InputError(
                    f"--lengths must be between {_LEAST} and the model's context of {context}, got {length}"
                )
            if PERPLEXITY in self.tasks and length < self.text + _LEAST:
                raise InputError(
                    f"--text must leave {_LEAST} tokens of a length of {length}, got {self.text}"
                )


@dataclass(frozen=True, slots=True)
class Passage:
    """A book's first tokens, which are read, and the next ones, which are scored."""

    id: str
    length: int
    ids: list[int]
    text: list[int]


def questions(settings: Settings, tokenizer: Tokenizer) -> list[Question]:
    """All questions of the chosen tasks, and those of LongBench.

    Raises:
        InputError: a folder cannot be read, or a length holds no task.
    """
    out: list[Question] = []
    if settings.longbench is not None:
        out += longbench.load(settings.longbench, tokenizer, max(settings.lengths), settings.per_task)
    for length in settings.lengths:
        for task in settings.tasks:
            if task == NEEDLE:
                book = books(settings.books)[0]
                out += needles.needle_grid(
                    tokenizer, book, length, settings.depths, settings.seed, settings.per_task
                )
            elif task != PERPLEXITY:
                draw, room = _DRAWN[task]
                out += needles.draw_questions(
                    task, draw, room, tokenizer, length, settings.seed, settings.per_task
                )
    return out


def passages(settings: Settings, tokenizer: Tokenizer) -> list[Passage]:
    """What perplexity is measured on: of every length and book one passage; the text is part of the length.

    Raises:
        InputError: a folder cannot be read, or its books are too short.
    """
    if PERPLEXITY not in settings.tasks:
        return []
    found = books(settings.books)
    return [_passage(book, length, settings, tokenizer) for length in settings.lengths for book in found]


def _passage(book: Book, length: int, settings: Settings, tokenizer: Tokenizer) -> Passage:
    ids = tokenizer.encode(book.text, special=False)
    if len(ids) < length:
        raise InputError(f"the book {book.name} has {len(ids)} tokens, {length} are wanted")
    # the first token of the text comes of a full pass, and the engine would draw one behind the last
    read = length - settings.text - 2
    return Passage(f"{PERPLEXITY} {length} {book.name}", length, ids[:read], ids[read : length - 1])


def measure(
    loaded: LoadedModel,
    methods: Sequence[Method],
    drafting: Drafting,
    asked: Sequence[Question],
    read: Sequence[Passage],
    log: Log,
    on_done: Callable[[], None],
) -> None:
    """Answers and scores what the log does not hold yet."""
    longest = max([len(q.ids) + q.max_tokens for q in asked] + [p.length for p in read])
    runner = Runner(loaded, methods, drafting, longest)
    for question in asked:
        if question.id not in log.cells:
            found = runner.answers(question)
            head = {"task": question.task, "length": question.length, "depth": question.depth}
            log.append({"key": question.id, **head, "outcomes": [asdict(o) for o in found]})
        on_done()
    for passage in read:
        if passage.id not in log.cells:
            found = runner.perplexity(passage.ids, passage.text)
            head = {"task": PERPLEXITY, "length": passage.length, "depth": None}
            log.append({"key": passage.id, **head, "outcomes": [asdict(o) for o in found]})
        on_done()


def summarise(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One object per length, task and method, and one over the retrieval tasks of a length.

    `score` is the mean in percent, for perplexity the perplexity. `kept` is the ratio to full KV, turned so
    that less is worse: of scores score / full, of perplexities full / perplexity. None where full KV scores
    nothing.
    """
    out = []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        here = [cell for cell in cells if cell["length"] == length]
        tasks = list(dict.fromkeys(cell["task"] for cell in here))
        groups = {task: [cell for cell in here if cell["task"] == task] for task in tasks}
        drawn = [cell for cell in here if cell["task"] in TASKS and cell["task"] != PERPLEXITY]
        if len({cell["task"] for cell in drawn}) > 1:
            groups["all retrieval"] = drawn
        for task, own in groups.items():
            out += _rows(task, length, own)
    return out


def _rows(task: str, length: int, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_method: dict[str, list[Outcome]] = {}
    for cell in cells:
        for outcome in cell["outcomes"]:
            by_method.setdefault(outcome["method"], []).append(Outcome(**outcome))
    scores = {name: _value(task, own) for name, own in by_method.items()}
    full = scores["full"]
    rows = []
    for name, own in by_method.items():
        policy, _, budget = name.partition("@")
        value = scores[name]
        kept = full / value if task == PERPLEXITY else value / full if full else None
        shares = [outcome.share for outcome in own if outcome.share is not None]
        rows.append(
            {
                "task": task,
                "length": length,
                "method": name,
                "policy": policy,
                "budget": int(budget) if budget else None,
                "score": round(value, 4),
                "kept": None if kept is None else round(kept, 5),
                "read_per_token": round(sum(o.read for o in own) / len(own), 2),
                "arr": round(sum(shares) / len(shares), 4) if shares else None,
                "al": round(sum(o.al for o in own) / len(own), 3),
                "prompts": len(own),
            }
        )
    return rows


def _value(task: str, outcomes: Sequence[Outcome]) -> float:
    if task == PERPLEXITY:
        return math.exp(-sum(o.value for o in outcomes) / sum(o.tokens for o in outcomes))
    return 100 * sum(o.value for o in outcomes) / len(outcomes)
