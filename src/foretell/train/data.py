"""Prompts to train on, from files that may be dirty: what cannot be used is counted, not fatal."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.errors import InputError

_TEXT = (".txt", ".md")
_FORMS = "prompt, question, turns (the first is taken), or messages (with role and content)"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in order, without repetitions.

    Args:
        messages: a conversation each, which goes through the chat template.
        skipped: why a line was left out -> how many lines.
        digest: of all prompts of the sources, also those beyond a limit.
    """

    messages: tuple[tuple[Mapping[str, str], ...], ...]
    skipped: Mapping[str, int]
    digest: str


@dataclass(slots=True)
class _Reader:
    found: dict[str, tuple[Mapping[str, str], ...]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, messages: Sequence[Mapping[str, str]]) -> None:
        key = json.dumps(list(messages), ensure_ascii=False, sort_keys=True)
        if key in self.found:
            self.skipped["repeated"] += 1
        self.found.setdefault(key, tuple(messages))


def read_prompts(sources: Sequence[Path], limit: int | None = None) -> Prompts:
    """Prompts of JSONL files and of folders with text files, the files in the order given.

    Args:
        limit: prompts at most, the first ones.

    Raises:
        InputError: a source is missing or of no known form, or nothing in it can be used.
    """
    reader = _Reader()
    for source in sources:
        if source.is_dir():
            files = sorted(path for path in source.iterdir() if path.suffix in _TEXT and path.is_file())
            if not files:
                raise InputError(f"data: {source} holds no {' or '.join(_TEXT)} file")
            for path in files:
                _add_text(reader, path)
        elif source.suffix == ".jsonl" and source.is_file():
            lines = source.read_bytes().split(b"\n")
            for line in lines if lines[-1] else lines[:-1]:  # a last newline begins no line
                _add_line(reader, line)
        else:
            raise InputError(f"data: {source} is neither a .jsonl file nor a folder of text files")
    kept = list(reader.found.items())
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in reader.skipped.items()) or "it is empty"
        raise InputError(
            f"data holds no usable prompt: {why}", hint=f"each line is a JSON object with {_FORMS}"
        )
    digest = hashlib.sha256("\n".join(key for key, _ in kept).encode()).hexdigest()[:16]
    return Prompts(tuple(messages for _, messages in kept[:limit]), dict(reader.skipped), digest)


def _add_text(reader: _Reader, path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        reader.skipped["not UTF-8"] += 1
        return
    if not text:
        reader.skipped["empty"] += 1
        return
    reader.add([{"role": "user", "content": text}])


def _add_line(reader: _Reader, line: bytes) -> None:
    if not line.strip():
        reader.skipped["empty"] += 1
        return
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        reader.skipped["not UTF-8"] += 1
        return
    except ValueError:
        reader.skipped["not JSON"] += 1
        return
    messages = _messages(record)
    if messages is None:
        reader.skipped["without a prompt"] += 1
    elif not all(message["content"].strip() for message in messages):
        reader.skipped["empty"] += 1
    else:
        reader.add(messages)


def _messages(record: Any) -> list[dict[str, str]] | None:
    """The conversation of a record; None = it has none."""
    if not isinstance(record, Mapping):
        return None
    if isinstance(listed := record.get("messages"), list) and listed:
        good = all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in listed)
        if not good or not all(isinstance(m.get("content"), str) for m in listed):
            return None
        while listed and listed[-1]["role"] == "assistant":  # the target answers itself
            listed = listed[:-1]
        return [{"role": m["role"], "content": m["content"]} for m in listed] or None
    for value in _texts(record):
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
    return None


def _texts(record: Mapping[str, Any]) -> Iterator[Any]:
    yield record.get("prompt")
    yield record.get("question")
    if isinstance(turns := record.get("turns"), list) and turns:
        yield turns[0]
