"""Log-probabilities in OpenAI's two forms. They are the target's own, before temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from foretell.engine import TokenLogprob


class Names(Protocol):
    """What ids are called."""

    def text(self, token_id: int) -> str:
        """A token as text."""
        ...

    def data(self, token_id: int) -> bytes:
        """Its bytes."""
        ...


def chat_logprobs(entries: Sequence[TokenLogprob], names: Names) -> dict[str, Any]:
    """As chat completions tell them: a list of tokens, each with its alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = list(names.data(token_id))
        return {"token": names.text(token_id), "logprob": logprob, "bytes": data}

    content = [
        {
            **entry(each.token_id, each.logprob),
            "top_logprobs": [entry(i, logprob) for i, logprob in each.top.items()],
        }
        for each in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob], names: Names, offset: int) -> dict[str, Any]:
    """As completions tell them: parallel lists.

    Args:
        offset: characters of the answer before these tokens.
    """
    tokens = [names.text(each.token_id) for each in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [{names.text(i): p for i, p in reversed(each.top.items())} for each in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in entries],
        "top_logprobs": [dict(sorted(top.items(), key=lambda item: -item[1])) for top in tops],
        "text_offset": offsets,
    }
