"""Prompts of the built-in benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from foretell.api import LLM
from foretell.bench.weights import text_tokens
from foretell.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, as ids, with what it is measured as."""

    id: str
    task: str
    ids: list[int]
    max_tokens: int


def read(name: str) -> list[dict[str, object]]:
    """The records of a built-in file."""
    text = (files("foretell.bench") / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def single_turn(name: str, llm: LLM, max_tokens: int) -> list[Item]:
    """Items of a file whose records have a `prompt`; those marked `raw` get no chat template."""
    items = []
    for record in read(name):
        prompt = str(record["prompt"])
        if record.get("raw"):
            ids = llm.tokenizer.encode(prompt)
        else:
            ids = llm.encode([{"role": "user", "content": prompt}])
        limit = record.get("max_tokens", max_tokens)
        assert isinstance(limit, int)
        items.append(Item(str(record["id"]), str(record["task"]), ids, limit))
    return items


def conversations(name: str, llm: LLM, max_tokens: int, first: int | None = None) -> list[Item]:
    """Items of a file whose records have `turns`; a second turn follows the model's own greedy answer
    to the first."""
    items = []
    for record in read(name)[:first]:
        turns = record["turns"]
        assert isinstance(turns, Sequence)
        messages = [{"role": "user", "content": turns[0]}]
        if record["turn"] == 2:
            (answer,) = llm.generate(messages, SamplingParams(max_tokens=max_tokens))
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turns[1]}]
        items.append(Item(str(record["id"]), str(record["task"]), llm.encode(messages), max_tokens))
    return items


def passages(llm: LLM, max_tokens: int, count: int, length: int) -> list[Item]:
    """Pieces of Python's language reference, of `length` tokens each, to go on from.

    Raises:
        InputError: the text is too short for them.
    """
    start = llm.tokenizer.encode("")
    room = length - len(start)
    tokens = text_tokens(llm.tokenizer, count * room)
    pieces = [tokens[at : at + room] for at in range(0, count * room, room)]
    return [Item(f"piece-{i}", "continue", [*start, *piece], max_tokens) for i, piece in enumerate(pieces)]
