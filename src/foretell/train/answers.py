"""The target's own answers to the prompts: what a drafter learns to foresee.

One line per prompt in a JSONL file, in order; an interrupted run goes on behind the last whole line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.api import LLM
from foretell.errors import InputError
from foretell.train.data import Prompts
from foretell.train.files import disk_error
from foretell.types import SamplingParams

_GROUP = 512  # answers between two writes

Advance = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the target's answer, as ids; the answer begins at `prompt`."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are drawn.

    Args:
        max_tokens: of an answer.
        temperature: 0 = greedy.
        seed: answer i is drawn with seed + i.
        max_prompt: longer prompts are left out.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    max_prompt: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


def write_answers(
    llm: LLM, prompts: Prompts, settings: AnswerSettings, path: Path, advance: Advance
) -> list[Sample]:
    """All answers, those that the file holds and those that are made now.

    Raises:
        InputError: the disk is full (what is written stays), or the file is of other prompts.
    """
    total = len(prompts.messages)
    done = _keep_whole_lines(path)
    if done > total:
        raise InputError(f"{path} holds {done} answers to {total} prompts", hint="choose another --cache")
    advance("answers", done, total)
    while done < total:
        group = range(done, min(total, done + _GROUP))
        lines = list(_answer(llm, prompts, settings, group))
        _append(path, lines)
        done = group.stop
        advance("answers", done, total)
    return list(read_answers(path))


def read_answers(path: Path) -> Iterator[Sample]:
    """The answers of a file; prompts that were left out are none."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["answer"]:
                tokens = (*record["prompt"], *record["answer"])
                yield Sample(tokens, len(record["prompt"]))


def _answer(llm: LLM, prompts: Prompts, settings: AnswerSettings, group: range) -> Iterator[dict[str, Any]]:
    ids = [llm.encode(list(prompts.messages[i])) for i in group]
    room = min(settings.max_prompt, llm.loaded.model.max_context - settings.max_tokens)
    short = [i for i, prompt in enumerate(ids) if len(prompt) <= room]
    params = [_params(settings, group[i]) for i in short]
    answers = dict(zip(short, llm.generate([ids[i] for i in short], params) if short else [], strict=True))
    for i, prompt in enumerate(ids):
        answer = answers[i].token_ids if i in answers else []
        yield {"prompt": prompt, "answer": answer}


def _params(settings: AnswerSettings, number: int) -> SamplingParams:
    if settings.temperature == 0:
        return SamplingParams(max_tokens=settings.max_tokens)
    return SamplingParams(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed + number
    )


def _keep_whole_lines(path: Path) -> int:
    """How many lines a file has; half a line at its end, which a killed run left, is cut off."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
    return data.count(b"\n")


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path, "the answers so far are kept") from error
