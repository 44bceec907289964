"""Text to read: books of one's own, or what comes with Python on every machine."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from foretell.bench.weights import language_reference
from foretell.errors import InputError

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'])")
_WORD = re.compile(r"\b[a-z]{4,9}\b")


@dataclass(frozen=True, slots=True)
class Book:
    """A text with its name."""

    name: str
    text: str

    def sentences(self) -> list[str]:
        """In order, white space made single."""
        return [" ".join(part.split()) for part in _SENTENCE.split(self.text) if part.strip()]


def books(folder: Path | None) -> list[Book]:
    """The .txt files of a folder by name, or two texts of Python's standard library: the language reference
    (`pydoc_data.topics`) as prose and `argparse` as code.

    Raises:
        InputError: there is no such folder, or nothing to read in it.
    """
    if folder is None:
        return list(_standard_library())
    if not folder.is_dir():
        raise InputError(f"--books: there is no folder {folder}")
    found = []
    for path in sorted(folder.glob("*.txt")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InputError(f"--books: {path} cannot be read: {error}") from error
        if text.strip():
            found.append(Book(path.stem, text))
    if not found:
        raise InputError(f"--books: {folder} holds no .txt file with text")
    return found


@functools.cache
def words() -> tuple[str, ...]:
    """Common English words of 4 to 9 letters, in order of the alphabet: those of the language reference."""
    return tuple(sorted(set(_WORD.findall(_standard_library()[0].text))))


@functools.cache
def _standard_library() -> tuple[Book, ...]:
    import argparse
    import inspect

    return Book("python-reference", language_reference()), Book("argparse.py", inspect.getsource(argparse))
