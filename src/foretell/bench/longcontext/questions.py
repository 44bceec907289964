"""A question over a long prompt, and how a prompt is cut to a length in the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.errors import InputError
from foretell.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with what a right answer holds.

    Args:
        id: unique among the questions of a run.
        task, length: what it is measured as; the length counts prompt and answer. 0 = as the data has it.
        ids: the prompt.
        references: strings that a right answer holds, or accepted answers; see the metric.
        max_tokens: room for the answer, which `stop` may end before.
        metric: name in `metrics.METRICS`.
        depth: where the needle lies, 0 = at the beginning, 1 = at the end; None = not asked.
        classes: names that a classification may answer.
        first_line: whether only the answer's first line counts.
        min_tokens: `stop` has no effect before.
    """

    id: str
    task: str
    length: int
    ids: list[int]
    references: tuple[str, ...]
    max_tokens: int
    metric: str
    depth: float | None = None
    classes: tuple[str, ...] = ()
    first_line: bool = False
    stop: tuple[str | int, ...] = ()
    min_tokens: int = 0


def fit(
    build: Callable[[int], str], room: int, tokenizer: Tokenizer, what: str, most: int | None = None
) -> tuple[list[int], int]:
    """The longest prompt of at most `room` tokens, and its number of pieces.

    Args:
        build: number of pieces -> text; more pieces make a longer text.
        what: the task, for messages.
        most: pieces that there are.

    Raises:
        InputError: no piece fits.
    """
    low, high = 0, 1
    while high != low and len(tokenizer.encode(build(high))) <= room:
        low, high = high, 2 * high if most is None else min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if len(tokenizer.encode(build(middle))) <= room:
            low = middle
        else:
            high = middle
    if low == 0:
        raise InputError(f"{what} does not fit {room} tokens", hint="choose a greater --length")
    return tokenizer.encode(build(low)), low
