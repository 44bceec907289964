"""What keeping weights in fewer bits costs and gains: perplexity on real text, and time per step.

The text is the language reference that comes with Python: English prose with examples, on every machine.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.attention import Segment, pack
from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.tokenizer import Tokenizer

_WINDOW = 512  # tokens that a prediction may look back on


@dataclass(frozen=True, slots=True)
class Form:
    """A model with its weights kept in one way.

    Args:
        perplexity: over the text; `ratio` of it to fp32's.
        seconds: of a step, by rows.
    """

    weights: str
    perplexity: float
    ratio: float
    seconds: dict[int, float]

    def to_json(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "perplexity": round(self.perplexity, 4),
            "perplexity_to_fp32": round(self.ratio, 5),
            "step_ms": {rows: round(1000 * s, 3) for rows, s in self.seconds.items()},
        }


def language_reference() -> str:
    """Python's, which every machine has: prose."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_tokens(tokenizer: Tokenizer, count: int, path: Path | None = None) -> list[int]:
    """`count` tokens of a text file, or of Python's language reference.

    Raises:
        InputError: the file cannot be read or is too short.
    """
    if path is None:
        text = language_reference()
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    tokens = tokenizer.encode(text, special=False)
    if len(tokens) < count:
        raise InputError(f"the text has {len(tokens)} tokens, {count} are wanted")
    return tokens[:count]


def perplexity(model: TargetModel, tokens: Sequence[int], on_window: Callable[[], None]) -> float:
    """exp of the mean negative log-likelihood, window by window of 512 tokens."""
    total, count = 0.0, 0
    arena = model.new_arena(_WINDOW)
    for start in range(0, len(tokens) - 1, _WINDOW):
        part = list(tokens[start : start + _WINDOW])
        if len(part) < 2:
            break
        # a chain hanging on the first token: every row's logits are wanted
        batch = pack([Segment(0, 0, part[:1], part[1:], range(-1, len(part) - 2))], arena)
        logits_RV = model.forward(batch).logits_RV[:-1]
        wanted = torch.tensor(part[1:], device=logits_RV.device)
        total -= float(logits_RV.log_softmax(-1).gather(1, wanted[:, None]).double().sum())
        count += len(wanted)
        on_window()
    return math.exp(total / count)


def windows(tokens: Sequence[int]) -> int:
    """How often `perplexity` reports."""
    return math.ceil((len(tokens) - 1) / _WINDOW)
