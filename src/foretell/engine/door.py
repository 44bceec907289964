"""What the engine refuses at the door."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.sampling import Constraint
from foretell.types import Grammar, SamplingParams


def check(prompt: Sequence[int], params: SamplingParams, target: TargetModel, *, has_text: bool) -> None:
    """Whether a prompt can be answered.

    Raises:
        InputError: it is empty or too long, names ids outside the vocabulary, or wants stop strings where
            there is no text.
    """
    if not prompt:
        raise InputError("the prompt is empty: it has no tokens")
    context, vocabulary = target.max_context, target.vocab_size
    if len(prompt) >= context:
        raise InputError(f"the prompt has {len(prompt)} tokens, the model's context holds {context}")
    if len(prompt) + params.max_tokens > context:
        raise InputError(
            f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) exceed the model's "
            f"context of {context}",
            hint=f"max_tokens can be at most {context - len(prompt)}",
        )
    if bad := [token for token in prompt if not 0 <= token < vocabulary]:
        raise InputError(f"prompt token {bad[0]} is outside the vocabulary of {vocabulary}")
    for name, ids in (("logit_bias", params.logit_bias), ("stop", params.stop_ids)):
        if bad := [token for token in ids if token >= vocabulary]:
            raise InputError(f"{name} token {bad[0]} is outside the vocabulary of {vocabulary}")
    if not has_text and params.stop_strings:
        raise InputError("stop strings need a tokenizer")


def constraint_of(
    grammar: Grammar | None, *, constrain: Callable[[Grammar], Constraint] | None
) -> Constraint | None:
    """What a request's grammar allows; None = it has none.

    Raises:
        InputError: it cannot be met, or there is no tokenizer.
    """
    if grammar is None:
        return None
    if constrain is None:
        raise InputError("a grammar needs a tokenizer")
    return constrain(grammar)
