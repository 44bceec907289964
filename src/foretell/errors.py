"""Errors that a user can cause and mend. Anything else is a bug and keeps its own type."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the message names the field, the value and what would be right.

    Args:
        message: what is wrong.
        hint: what to do about it, printed on a line of its own.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class GrammarError(InputError):
    """A grammar that is malformed, or asks for what cannot be met or enforced."""


class RankError(RuntimeError):
    """A run over several ranks that cannot go on: the message names the rank and what happened to it."""
