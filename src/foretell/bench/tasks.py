"""Prompts by task, from built-in files, published benchmarks, or one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.api import LLM
from foretell.bench.items import Item, read
from foretell.errors import InputError

BUILT_IN = ("demo", "edit", "identity")
# Spec-Bench's first task is MT-Bench, whose own categories it keeps
_CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_FORMS = "Spec-Bench (category, turns), HumanEval (task_id, prompt), or prompt (and optionally task)"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was found. `raw`: it is completed as it is, without a chat template."""

    id: str
    task: str
    text: str
    raw: bool = False
    max_tokens: int | None = None


def load(sources: Sequence[str], per_task: int | None = None) -> list[Prompt]:
    """Prompts of several sources, at most `per_task` of each task.

    Args:
        sources: names of built-in files, .jsonl files, or folders of text files.

    Raises:
        InputError: a source cannot be read or is of no known form.
    """
    counts: dict[str, int] = {}
    known: set[tuple[str, str]] = set()
    kept = []
    for source in sources:
        for prompt in _prompts(source):
            if (source, prompt.id) in known:  # a second turn of the same conversation
                continue
            known.add((source, prompt.id))
            counts[prompt.task] = counts.get(prompt.task, 0) + 1
            if per_task is None or counts[prompt.task] <= per_task:
                kept.append(prompt)
    return kept


def encode(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> list[Item]:
    """The prompts as ids, through the chat template unless they are raw."""
    items = []
    for prompt in prompts:
        if prompt.raw:
            ids = llm.tokenizer.encode(prompt.text)
        else:
            ids = llm.encode([{"role": "user", "content": prompt.text}])
        items.append(Item(prompt.id, prompt.task, ids, min(max_tokens, prompt.max_tokens or max_tokens)))
    return items


def _prompts(source: str) -> Iterator[Prompt]:
    path = Path(source)
    if source in BUILT_IN:
        for number, record in enumerate(read(source), start=1):
            yield _prompt(record, f"{source} {number}", source)
    elif path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".txt", ".md") and p.is_file())
        if not files:
            raise InputError(f"{path} holds no .txt or .md file")
        for file in files:
            yield Prompt(file.stem, path.name, _text(file))
    elif path.is_file():
        yield from _lines(path)
    else:
        raise InputError(
            f"no prompts at {source!r}",
            hint=f"a .jsonl file, a folder of texts, or one of {', '.join(BUILT_IN)}",
        )


def _lines(path: Path) -> Iterator[Prompt]:
    found = False
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON: {error}") from error
        found = True
        yield _prompt(record, f"{path}, line {number}", path.stem)
    if not found:
        raise InputError(f"{path} holds no prompts")


def _prompt(record: Any, where: str, name: str) -> Prompt:
    """One record of any known form."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: not an object; known forms: {_FORMS}")
    turns, prompt = record.get("turns"), record.get("prompt")
    task = str(record.get("task") or record.get("category") or name).partition("/")[0].replace("_", "-")
    task = "multi-turn" if task in _CHAT else task
    number = str(record.get("question_id") or record.get("task_id") or record.get("id") or where)
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return Prompt(number, task, turns[0])
    if isinstance(prompt, str) and prompt:
        human_eval = "task_id" in record and "entry_point" in record
        limit = record.get("max_tokens")
        raw = bool(record.get("raw")) or human_eval
        return Prompt(number, "code" if human_eval else task, prompt, raw, limit)
    raise InputError(f"{where}: no prompt in it; known forms: {_FORMS}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
