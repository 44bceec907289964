"""LongBench (Bai et al. 2023), the 16 English and code tasks, from its published JSONL files.

Metrics, limits, stops and truncation are the published ones, and so is the shape of prompts: instruction,
context, instruction again, question; examples first where there are some. Their words are our own, unless the
folder holds the published `dataset2prompt.json` too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.longcontext.questions import Question
from foretell.errors import InputError
from foretell.models.tokenizer import Tokenizer

PROMPTS = "dataset2prompt.json"


@dataclass(frozen=True, slots=True)
class _Task:
    """How a data set is asked and scored.

    Args:
        chat: whether the prompt goes through the chat template.
        first_line: whether only the answer's first line counts.
    """

    prompt: str
    metric: str
    max_tokens: int
    chat: bool = True
    first_line: bool = False


def load(folder: Path, tokenizer: Tokenizer, longest: int, per_task: int | None) -> list[Question]:
    """The questions of every known data set in a folder (`hotpotqa.jsonl`, and `hotpotqa_e.jsonl` of
    LongBench-E), at most `per_task` of each.

    Args:
        longest: tokens of prompt and answer; the middle of a longer prompt is left out.

    Raises:
        InputError: there is no such folder or nothing known in it, or a line is malformed.
    """
    if not folder.is_dir():
        raise InputError(f"--longbench: there is no folder {folder}")
    published, out = _published(folder), []
    for name, task in TASKS.items():
        for path in (folder / f"{name}.jsonl", folder / f"{name}_e.jsonl"):
            if path.is_file():
                prompt = published.get(name, task.prompt)
                out += _questions(path, task, prompt, tokenizer, longest, per_task)
    if not out:
        raise InputError(
            f"--longbench: {folder} holds no question", hint=f"files such as {next(iter(TASKS))}.jsonl"
        )
    return out


def truncate(text: str, tokenizer: Tokenizer, most: int) -> str:
    """The text, but for its middle where it has more than `most` tokens."""
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        return text
    half = most // 2
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def _published(folder: Path) -> dict[str, str]:
    path = folder / PROMPTS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--longbench: {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InputError(f"--longbench: {path} must map data sets to prompts")
    return found


def _questions(
    path: Path, task: _Task, prompt: str, tokenizer: Tokenizer, longest: int, per_task: int | None
) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--longbench: {path} cannot be read: {error}") from error
    out: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if per_task is not None and len(out) == per_task:
            break
        record = _record(line, f"--longbench: {path}, line {number}")
        text = prompt.replace("{context}", record["context"]).replace("{input}", record["input"])
        text = truncate(text, tokenizer, longest - task.max_tokens - (_WRAPPER if task.chat else _AGAIN))
        if task.chat and tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            ids = tokenizer.encode(tokenizer.render(messages), special=False)
        else:
            ids = tokenizer.encode(text)
        # a summary of a conversation ends with its line, and is never empty
        conversation = path.stem.startswith("samsum")
        out.append(
            Question(
                f"{path.stem} {number}",
                path.stem,
                0,
                ids,
                tuple(record["answers"]),
                task.max_tokens,
                task.metric,
                classes=tuple(record["all_classes"] or ()),
                first_line=task.first_line,
                stop=tuple(tokenizer.encode("\n", special=False)[-1:]) if conversation else (),
                min_tokens=1 if conversation else 0,
            )
        )
    return out


def _record(line: str, where: str) -> Mapping[str, Any]:
    """The fields of a line.

    Raises:
        InputError: one is missing or of another kind.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: not an object")
    for name in ("context", "input"):
        if not isinstance(value.get(name), str):
            raise InputError(f"{where}: {name} must be text, got {value.get(name)!r:.60}")
    answers, classes = value.get("answers"), value.get("all_classes")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise InputError(f"{where}: answers must be a list of texts, got {answers!r:.60}")
    if classes is not None and not isinstance(classes, list):
        raise InputError(f"{where}: all_classes must be a list or null, got {classes!r:.60}")
    return {"all_classes": classes, **value}


_WRAPPER, _AGAIN = 64, 8  # room for the chat template, and for tokens that come anew where halves meet


def _asking(what: str, how: str) -> str:
    """Instruction, context, instruction again, question, cue."""
    return (
        f"You are given {what} and a question. {how}\n\n{{context}}\n\n"
        f"Now answer the question about {what} above. {how}\n\nQuestion: {{input}}\n\nAnswer:"
    )


def _summing(what: str, task: str, cue: str = "Summary:") -> str:
    return f"You are given {what}. {task}\n\n{{context}}\n\nNow: {task}\n\n{cue}"


_SHORT = "Answer as briefly as you can, with a phrase if possible, and explain nothing."
_ARTICLE = (
    f'{_SHORT} If the article does not answer it, write "unanswerable"; answer yes-or-no questions with '
    '"yes", "no" or "unanswerable".'
)
_ONLY = "Give only the answer and no other words."
_CODE = "Complete the code below.\n{context}{input}Next line of code:\n"

TASKS: dict[str, _Task] = {
    "narrativeqa": _Task(_asking("a story", _SHORT), "f1", 128),
    "qasper": _Task(_asking("a scientific article", _ARTICLE), "f1", 128),
    "multifieldqa_en": _Task(_asking("a text", _ONLY), "f1", 64),
    "hotpotqa": _Task(_asking("some passages", _ONLY), "f1", 32),
    "2wikimqa": _Task(_asking("some passages", _ONLY), "f1", 32),
    "musique": _Task(_asking("some passages", _ONLY), "f1", 32),
    "gov_report": _Task(
        _summing("a report by a government agency", "Write a one-page summary of it."), "rouge-l", 512
    ),
    "qmsum": _Task(
        "You are given the transcript of a meeting and a question. Answer it in one or more sentences.\n\n"
        "{context}\n\nNow answer the question about the meeting above in one or more sentences.\n\n"
        "Question: {input}\nAnswer:",
        "rouge-l",
        512,
    ),
    "multi_news": _Task(
        _summing("several news articles", "Write a one-page summary of all."), "rouge-l", 512
    ),
    "trec": _Task(
        "Name the type of the question. Here are some examples.\n\n{context}\n{input}",
        "classification",
        64,
        chat=False,
        first_line=True,
    ),
    "triviaqa": _Task(
        f"Answer the question from the passage. {_ONLY} Here are some examples.\n\n{{context}}\n\n{{input}}",
        "f1",
        32,
        chat=False,
        first_line=True,
    ),
    "samsum": _Task(
        "Summarize the dialogue in a few short sentences. Here are some examples.\n\n{context}\n\n{input}",
        "rouge-l",
        128,
        chat=False,
        first_line=True,
    ),
    "passage_count": _Task(
        "Some of the following paragraphs may be repeated. How many different ones are there?\n\n{context}"
        "\n\nHow many different paragraphs are there, each counted once? Write only the number.\n\nAnswer:",
        "number",
        32,
    ),
    "passage_retrieval_en": _Task(
        "Here are 30 numbered paragraphs and a summary. Which paragraph does it summarize?\n\n{context}\n\n"
        'The summary:\n\n{input}\n\nWrite the number of the paragraph as in "Paragraph 1".\n\nAnswer:',
        "number",
        32,
    ),
    "lcc": _Task(_CODE, "edit", 64, chat=False),
    "repobench-p": _Task(_CODE, "edit", 64, chat=False),
}
