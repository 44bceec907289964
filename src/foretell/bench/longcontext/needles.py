"""Retrieval from long prompts: the needle grid, passkeys, key-value pairs, and RULER's needle tasks that need
no text from outside (Hsieh et al. 2024: which needles, which haystack; the wording is our own).

Everything is a function of (seed, task, length, number).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from foretell.bench.longcontext.corpus import Book, words
from foretell.bench.longcontext.questions import Question, fit
from foretell.models.tokenizer import Tokenizer

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_ROOM = 128  # RULER's limit for an answer
_SHORT = 24  # room for one number
_PAIRS = 8192

# (tokenizer, rng, length) -> prompt, references
Draw = Callable[[Tokenizer, random.Random, int], tuple[list[int], tuple[str, ...]]]


def rng_of(seed: int, *key: object) -> random.Random:
    """A generator that no other question shares."""
    return random.Random(f"{seed} {' '.join(map(str, key))}")


def needle_grid(
    tokenizer: Tokenizer, book: Book, length: int, depths: int, seed: int, count: int
) -> list[Question]:
    """One needle in a book, at `depths` depths from the beginning (0) to the end (1); `count` of each.

    Raises:
        InputError: the length holds no haystack.
    """
    sentences = book.sentences()
    steps = [step / max(1, depths - 1) for step in range(depths)]
    return [
        _in_book(tokenizer, sentences, length, depth, rng_of(seed, "needle", length, depth, number), number)
        for depth in steps
        for number in range(count)
    ]


def _in_book(
    tokenizer: Tokenizer, sentences: Sequence[str], length: int, depth: float, rng: random.Random, number: int
) -> Question:
    first, key, value = rng.randrange(len(sentences)), _name(rng), _number(rng)

    def build(pieces: int) -> str:
        # a book that is too short begins again
        text = " ".join(sentences[(first + i) % len(sentences)] for i in range(pieces))
        return _recall_prompt(insert(text, _needle(key, value), depth), key)

    ids, _ = fit(build, length - _SHORT, tokenizer, "needle")
    name = f"needle {length} {depth:g} {number}"
    return _question(name, "needle", length, ids, (value,), _SHORT, depth=depth)


def insert(text: str, needle: str, depth: float) -> str:
    """The text with the needle at `depth` of its characters, moved back to the nearest end of a sentence."""
    place = round(depth * len(text))
    if place < len(text):
        place = text.rfind(". ", 0, place) + 1
    return " ".join(part for part in (text[:place].strip(), needle, text[place:].strip()) if part)


def draw_questions(
    task: str, draw: Draw, room: int, tokenizer: Tokenizer, length: int, seed: int, count: int
) -> list[Question]:
    """`count` questions of a task, with `room` tokens for the answer.

    Raises:
        InputError: the length does not hold the task.
    """
    out = []
    for number in range(count):
        ids, references = draw(tokenizer, rng_of(seed, task, length, number), length - room)
        out.append(_question(f"{task} {length} {number}", task, length, ids, references, room))
    return out


def _passkey(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """A five-digit key in repeated noise (Mohtashami and Jaggi 2023)."""
    key, depth = str(rng.randrange(10_000, 100_000)), rng.random()

    def build(pieces: int) -> str:
        noise = _noise(pieces)
        place = round(depth * pieces)
        body = [*noise[:place], f"The pass key is {key}. Remember it. {key} is the pass key.", *noise[place:]]
        return (
            "There is important information hidden in a lot of irrelevant text. Find it and memorize it.\n"
            f"{' '.join(body)}\nWhat is the pass key? The pass key is"
        )

    return fit(build, room, tokenizer, "passkey")[0], (key,)


def _key_value(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """One of many pairs (Liu et al. 2023), names to numbers instead of identifiers to identifiers."""
    pairs, place = _pairs(rng), rng.random()

    def build(count: int) -> str:
        body = "\n".join(f"{name}: {value}" for name, value in pairs[:count])
        asked = pairs[int(place * count)][0]
        return f"Each line holds a name and its number.\n{body}\nOne of these lines again:\n{asked}:"

    ids, count = fit(build, room, tokenizer, "kv", len(pairs))
    return ids, (pairs[int(place * count)][1],)


def _single(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """NIAH single 1: a number in repeated noise."""
    return _in_noise(tokenizer, rng, room, keys=1, values=1, asked=1)


def _multi_value(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """NIAH multivalue: four numbers of one key, in repeated noise."""
    return _in_noise(tokenizer, rng, room, keys=1, values=4, asked=1)


def _multi_query(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """NIAH multiquery: four keys of one number each, all asked, in repeated noise."""
    return _in_noise(tokenizer, rng, room, keys=4, values=1, asked=4)


def _multi_key(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """NIAH multikey 2: the haystack is needles of other keys."""
    pairs, place = _pairs(rng), rng.random()

    def build(count: int) -> str:
        body = " ".join(_needle(*pair) for pair in pairs[:count])
        return _recall_prompt(body, pairs[int(place * count)][0])

    ids, count = fit(build, room, tokenizer, "niah-multikey", len(pairs))
    return ids, (pairs[int(place * count)][1],)


def _in_noise(
    tokenizer: Tokenizer, rng: random.Random, room: int, *, keys: int, values: int, asked: int
) -> tuple[list[int], tuple[str, ...]]:
    names: list[str] = []
    while len(names) < keys:
        if (name := _name(rng)) not in names:
            names.append(name)
    found = {name: [_number(rng) for _ in range(values)] for name in names}
    needles = [_needle(name, value) for name, own in found.items() for value in own]
    depths = sorted(rng.random() for _ in needles)
    rng.shuffle(needles)

    def build(pieces: int) -> str:
        body = _noise(pieces)
        for depth, needle in reversed(list(zip(depths, needles, strict=True))):
            body.insert(round(depth * pieces), needle)
        if values > 1:
            return _list_prompt(" ".join(body), f"all secret numbers of {names[0]}")
        if asked > 1:
            return _list_prompt(" ".join(body), f"the secret numbers of {', '.join(names[:asked])}")
        return _recall_prompt(" ".join(body), names[0])

    references = tuple(value for name in names[:asked] for value in found[name])
    return fit(build, room, tokenizer, "niah")[0], references


def _pairs(rng: random.Random) -> list[tuple[str, str]]:
    """Different names with numbers, as many as the longest prompt holds."""
    made: dict[str, str] = {}
    while len(made) < _PAIRS:
        made.setdefault(_name(rng), _number(rng))
    return list(made.items())


def _question(
    name: str,
    task: str,
    length: int,
    ids: list[int],
    references: tuple[str, ...],
    room: int,
    *,
    depth: float | None = None,
) -> Question:
    stop = ("\n", ".") if len(references) == 1 else ("\n",)
    return Question(name, task, length, ids, references, room, "recall", depth=depth, stop=stop)


def _recall_prompt(body: str, key: str) -> str:
    return (
        "A secret number is hidden in the following text. Memorize it; you will be asked for it.\n"
        f"{body}\nWhat is the secret number of {key} in the text above? The secret number of {key} is"
    )


def _list_prompt(body: str, what: str) -> str:
    return (
        "Some secret numbers are hidden in the following text. Memorize them; you will be asked for them.\n"
        f"{body}\nWhat are {what} in the text above? They are"
    )


def _needle(key: str, value: str) -> str:
    return f"The secret number of {key} is {value}."


def _noise(pieces: int) -> list[str]:
    return [NOISE[i % len(NOISE)] for i in range(pieces)]


def _name(rng: random.Random) -> str:
    return f"{rng.choice(words())}-{rng.choice(words())}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


TASKS: dict[str, tuple[Draw, int]] = {
    "passkey": (_passkey, _SHORT),
    "kv": (_key_value, _SHORT),
    "niah-single": (_single, _SHORT),
    "niah-multikey": (_multi_key, _SHORT),
    "niah-multivalue": (_multi_value, _ROOM),
    "niah-multiquery": (_multi_query, _ROOM),
}
