"""Texts that a search goes by: needles in a haystack, and long prompts to go on from.

The haystack is Python's language reference; prompts are taken in turn from it and from the standard library's
source, which every machine has. Both are the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.bench import suffix, tasks, weights
from foretell.errors import InputError
from foretell.models.tokenizer import Tokenizer

_THINGS = ("boat", "dog", "song", "recipe", "horse", "garden", "clock", "play", "kite", "piano", "bridge")
_PEOPLE = ("Marta", "Tomas", "Ingrid", "Kofi", "Leila", "Hugo", "Yuki", "Olga", "Pedro", "Anya", "Samir")
_PLACES = ("Lisbon", "Bergen", "Accra", "Kyoto", "Quito", "Riga", "Tunis", "Perth", "Cork", "Pune", "Lima")
_FIRST = ("Silver", "Quiet", "Crooked", "Golden", "Hidden", "Frozen", "Lucky", "Velvet", "Broken", "Amber")
_SECOND = ("Lantern", "Harbor", "Meadow", "Falcon", "Thunder", "Compass", "Orchard", "Whistle", "Anchor")


@dataclass(frozen=True, slots=True)
class Needle:
    """A fact inside a haystack, and a question that only it answers.

    Args:
        tokens: the prompt; it ends where the answer begins.
        span: places of the fact.
        answer: text that a right answer holds.
    """

    tokens: tuple[int, ...]
    span: range
    answer: str


def needles(tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Needle]:
    """`count` haystacks of `length` tokens, the fact at evenly spread depths.

    Raises:
        InputError: the length leaves no room for a haystack, or there is too little text.
    """
    chance = random.Random(seed)
    hay = weights.text_tokens(tokenizer, 2 * length)
    found = []
    for number in range(count):
        thing, person, place = (chance.choice(words) for words in (_THINGS, _PEOPLE, _PLACES))
        answer = f"{chance.choice(_FIRST)} {chance.choice(_SECOND)}"
        stem = f"The {thing} that {person} keeps in {place} is called"
        fact = tokenizer.encode(f"\n\n{stem} {answer}.\n\n", special=False)
        question = f"\n\nQuestion: What is the {thing} that {person} keeps in {place} called?\nAnswer: {stem}"
        end = tokenizer.encode(question, special=False)
        start = tokenizer.encode("")
        room = length - len(start) - len(fact) - len(end)
        if room < len(fact):
            raise InputError(f"length must be at least {length + len(fact) - room}, got {length}")
        at = chance.randrange(len(hay) - room + 1)
        before = round(room * (number + 0.5) / count)
        text = hay[at : at + room]
        tokens = [*start, *text[:before], *fact, *text[before:], *end]
        first = len(start) + before
        found.append(Needle(tuple(tokens), range(first, first + len(fact)), answer))
    return found


def prompts(
    tokenizer: Tokenizer, length: int, count: int, data: Path | None, least: int
) -> list[tuple[int, ...]]:
    """`count` prompts of `length` tokens.

    Args:
        data: JSONL prompts (the middle of a longer one is left out), or a text file, of which pieces are
            taken; None = Python's language reference and standard library in turn.
        least: shorter prompts are left out.

    Raises:
        InputError: there is no prompt that is long enough.
    """
    if data is not None and data.suffix == ".jsonl":
        return _of_file(tokenizer, length, count, data, least)
    start = tokenizer.encode("")
    room = length - len(start)
    if data is not None:
        pieces = _pieces(weights.text_tokens(tokenizer, count * room, data), room)
    else:
        prose = _pieces(weights.text_tokens(tokenizer, (count + 1) // 2 * room), room)
        code = _pieces(suffix.text_tokens(tokenizer, count // 2 * room), room) if count > 1 else []
        pieces = [(prose, code)[i % 2][i // 2] for i in range(count)]
    return [(*start, *piece) for piece in pieces]


def _pieces(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]


def _of_file(tokenizer: Tokenizer, length: int, count: int, data: Path, least: int) -> list[tuple[int, ...]]:
    found = []
    for prompt in tasks.load([str(data)]):
        ids = tokenizer.encode(prompt.text)
        if len(ids) > length:
            ids = [*ids[: length // 2], *ids[len(ids) - (length - length // 2) :]]
        if len(ids) >= least:
            found.append(tuple(ids))
    if not found:
        raise InputError(f"no prompt in {data} has {least} tokens", hint="choose smaller budgets")
    return found[:count]
