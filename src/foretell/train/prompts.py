"""Instructions made from text that any machine has or can fetch: code, prose, sums, small talk.

Sources: Python's standard library (write, explain, edit, complete), its language reference and folders of
text (summarise, answer from a passage, continue), text in another language (translate), questions of a
JSONL file as they are. The same arguments give the same prompts.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import InputError
from foretell.train.subjects import ASKED, CHATTED, SUBJECTS

_WORDS = (60, 260)  # of a passage
_CODE = (200, 1500)  # characters of a function


@dataclass(frozen=True, slots=True)
class Made:
    """A prompt and the kind of task that it is."""

    task: str
    prompt: str


def make_prompts(
    texts: Sequence[Path], foreign: Sequence[Path], questions: Sequence[Path], per_task: int, seed: int
) -> list[Made]:
    """Prompts of every task that there is a source for, mixed.

    Args:
        texts: folders or files of text, beside the language reference.
        foreign: text that is to be translated, each named LANGUAGE=PATH.
        questions: JSONL files with a question, prompt or turns per line, taken as they are.
        per_task: prompts of each task at most.

    Raises:
        InputError: a source cannot be read.
    """
    chance = random.Random(seed)
    passages = _passages([*_reference(), *(_read(path) for path in texts for path in _files(path))], chance)
    if not passages:
        raise InputError("texts hold no passage of at least 60 words")
    made = [
        *_first(_code(chance), per_task),
        *_first(_chat(chance), per_task),
        *_first(_asked(chance), per_task),
        *_first((Made("summarise", f"Summarize: {p}") for p in passages), per_task),
        *_first((Made("continue", f"Continue this text:\n\n{_half(p)}") for p in passages[::-1]), per_task),
        *_first(_grounded(passages, chance), per_task),
        *_first(_translate(foreign, chance), per_task),
        *_first(_given(questions, chance), per_task),
    ]
    chance.shuffle(made)
    return made


def write_prompts(made: Sequence[Made], path: Path) -> None:
    """One JSON object with task and prompt per line."""
    lines = (json.dumps({"task": one.task, "prompt": one.prompt}, ensure_ascii=False) for one in made)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _first(items: Iterator[Made], count: int) -> list[Made]:
    kept: dict[str, Made] = {}
    for item in items:
        if len(kept) == count:
            break
        kept.setdefault(item.prompt, item)
    return list(kept.values())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".rst") and p.is_file())
    if not found:
        raise InputError(f"text: {path} holds no .txt, .md or .rst file")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"text: {path} cannot be read: {error.strerror}") from error


def _reference() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _passages(texts: Sequence[str], chance: random.Random) -> list[str]:
    """Runs of whole paragraphs, mixed; prose only."""
    passages = []
    for text in texts:
        run: list[str] = []
        size, want = 0, chance.randint(*_WORDS)
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            letters = sum(c.isalpha() or c.isspace() for c in paragraph)
            if len(words) < 12 or letters < 0.85 * len(paragraph):
                continue
            run.append(" ".join(words[: _WORDS[1]]))
            size += len(words)
            if size >= want:
                passages.append(" ".join(" ".join(run).split()[: _WORDS[1]]))
                run, size, want = [], 0, chance.randint(*_WORDS)
    chance.shuffle(passages)
    return passages


def _half(passage: str) -> str:
    words = passage.split()
    return " ".join(words[: max(30, len(words) // 2)])


def _grounded(passages: Sequence[str], chance: random.Random) -> Iterator[Made]:
    """Questions to be answered from passages that come first."""
    for first, second in zip(passages[::2], passages[1::2], strict=False):
        words = [w for w in re.findall(r"\b[A-Za-z][a-z]{6,}\b", first) if w.lower() != w or len(w) > 8]
        if not words:
            continue
        question = chance.choice(
            ("What is said about {w}?", "What does the text tell us of {w}?", "Why is {w} mentioned?",
             "who or what is {w}", "How does the text describe {w}?")
        ).format(w=chance.choice(words))  # fmt: skip
        body = f"{first}\n\n{second}"
        yield Made("grounded", " ".join(body.split()[: 2 * _WORDS[0] + 160]) + f"\n\nQuestion: {question}")


def _translate(foreign: Sequence[Path], chance: random.Random) -> Iterator[Made]:
    sentences = []
    for source in foreign:
        language, equals, place = str(source).partition("=")
        if not equals or not place:
            raise InputError(f"translate must look like LANGUAGE=PATH, got {str(source)!r}")
        for path in _files(Path(place)):
            text = " ".join(_read(path).split())
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-ZÄÖÜ])", text):
                if 6 <= len(sentence.split()) <= 40 and sum(
                    c.isalpha() or c == " " for c in sentence
                ) > 0.9 * len(sentence):
                    sentences.append((language, sentence))
    chance.shuffle(sentences)
    for language, sentence in sentences:
        yield Made("translate", f"Translate {language} to English: {sentence}")


def _given(paths: Sequence[Path], chance: random.Random) -> Iterator[Made]:
    from foretell.train.data import read_prompts

    if not paths:
        return
    conversations = list(read_prompts(paths).messages)
    chance.shuffle(conversations)
    for messages in conversations:
        yield Made("question", messages[-1]["content"])


def _asked(chance: random.Random) -> Iterator[Made]:
    """Short questions about subjects."""
    pairs = [(form, subject) for form in ASKED for subject in SUBJECTS]
    chance.shuffle(pairs)
    for form, subject in pairs:
        yield Made("ask", form.format(s=subject))


def _chat(chance: random.Random) -> Iterator[Made]:
    """Requests to write, advise, plan, play a role."""
    pairs = [(form, subject) for form in CHATTED for subject in SUBJECTS]
    chance.shuffle(pairs)
    for form, subject in pairs:
        yield Made("chat", form.format(s=subject))


def _code(chance: random.Random) -> Iterator[Made]:
    functions = list(_functions())
    chance.shuffle(functions)
    for number, (name, source, told) in enumerate(functions):
        kind = ("write", "explain", "edit", "complete")[number % 4]
        if kind == "write":
            yield Made("code", f"Write a Python function `{name}`. {told}")
        elif kind == "explain":
            yield Made("code", f"Explain what this function does:\n\n```python\n{source}\n```")
        elif kind == "edit":
            wish = chance.choice(
                ("Add type hints", "Add a docstring", "Rename its arguments", "Add a log line")
            )
            yield Made("code", f"{wish} and show the whole function:\n\n```python\n{source}\n```")
        else:
            lines = source.splitlines()
            yield Made(
                "code", "Complete this function:\n\n```python\n" + "\n".join(lines[: len(lines) // 2 + 1])
            )


def _functions() -> Iterator[tuple[str, str, str]]:
    """Name, source and first sentence of the documentation of the standard library's functions."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
            told = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if _CODE[0] <= len(source) <= _CODE[1] and told:
                yield node.name, source, told
