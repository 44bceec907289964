"""RULER's tasks beyond retrieval (Hsieh et al. 2024): variable tracking, common words, frequent words. The
rules and limits are the published ones, the wording is our own; the words of `common-words` are those of
Python's language reference.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise

from foretell.bench.longcontext.corpus import words
from foretell.bench.longcontext.needles import NOISE, Draw
from foretell.bench.longcontext.questions import fit
from foretell.models.tokenizer import Tokenizer

_HOPS = 4
_COMMON, _OFTEN, _SELDOM = 10, 30, 3  # words asked for, how often each occurs, how often the others
_ALPHA = 2.0  # of the zeta distribution of frequent words


def _variables(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """One chain of assignments in repeated noise: which variables have the value? All of the chain."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        if (name := "".join(rng.choices(string.ascii_uppercase, k=5))) not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    depths = sorted(rng.random() for _ in lines)

    def build(pieces: int) -> str:
        body = [NOISE[i % len(NOISE)] for i in range(pieces)]
        for depth, line in reversed(list(zip(depths, lines, strict=True))):
            body.insert(round(depth * pieces), line)
        return (
            "Memorize and follow the chain of variable assignments hidden in the following text.\n"
            f"{' '.join(body)}\nQuestion: Which {len(names)} variables have the value {value} in the text "
            f"above?\nAnswer: By the chain of assignments, the variables with the value {value} are VAR"
        )

    return fit(build, room, tokenizer, "variables")[0], tuple(names)


def _common_words(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """A numbered list in which ten words occur 30 times and all others 3 times."""
    chosen = rng.sample(words(), min(2048, len(words())))
    common, others = chosen[:_COMMON], chosen[_COMMON:]
    state = rng.random()

    def build(pieces: int) -> str:
        listed = common * _OFTEN + others[:pieces] * _SELDOM
        random.Random(state).shuffle(listed)
        body = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
        return (
            "This is a numbered list of words, some of which occur more often than others. Memorize those "
            f"that occur most often.\n{body}\nQuestion: Which {_COMMON} words occur most often in the list "
            "above?\n"
            f"Answer: The {_COMMON} words that occur most often are: 1."
        )

    return fit(build, room, tokenizer, "common-words", len(others))[0], tuple(common)


def _frequent_words(tokenizer: Tokenizer, rng: random.Random, room: int) -> tuple[list[int], tuple[str, ...]]:
    """Coded words whose frequencies fall as rank to the power of -2, and dots, which rank first; the three
    most frequent words."""
    coded: list[str] = []
    while len(coded) < 64:
        if (word := "".join(rng.choices(string.ascii_lowercase, k=6))) not in coded:
            coded.append(word)
    vocabulary = ["...", *coded]
    weights = [rank**-_ALPHA for rank in range(1, len(vocabulary) + 1)]
    total, state = sum(weights), rng.random()

    def build(pieces: int) -> str:
        listed = [
            word
            for word, weight in zip(vocabulary, weights, strict=True)
            for _ in range(max(1, round(pieces * weight / total)))
        ]
        random.Random(state).shuffle(listed)
        return (
            "Read the following coded text and count how often each coded word occurs.\n"
            f"{' '.join(listed)}\nQuestion: Which three coded words occur most often in the text above, dots "
            "left out?\nAnswer: The three coded words that occur most often are:"
        )

    return fit(build, room, tokenizer, "frequent-words")[0], tuple(coded[:3])


TASKS: dict[str, tuple[Draw, int]] = {
    "variables": (_variables, 30),
    "common-words": (_common_words, 120),
    "frequent-words": (_frequent_words, 50),
}
