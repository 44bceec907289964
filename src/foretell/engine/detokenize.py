"""Text of a growing list of ids, token by token, never with half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what decoders put for bytes that are no full character


class Detokenizer:
    """Decodes incrementally: the text after n pushes is a prefix of `decode(all ids)`.

    Only the ids since the last settled character are decoded again, together with the few before them
    that decide about spacing.

    Args:
        decode: the tokenizer's own decode.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # ids before here no longer change what follows
        self._settled = 0  # ids before here are in `text`
        self._ends: list[tuple[int, int]] = []  # (ids, characters) each time the text grew
        self.text = ""

    def push(self, token_id: int) -> None:
        """Adds one id; `text` grows by the characters that it completes."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        if len(now) > len(before) and not now.endswith(_BROKEN):
            self._grow(now[len(before) :])

    def ids_for(self, characters: int) -> int:
        """The fewest ids whose text has at least so many characters."""
        return (
            next((ids for ids, length in self._ends if length >= characters), len(self._ids))
            if characters
            else 0
        )

    def flush(self) -> None:
        """Ends the text: bytes that never became a character show as U+FFFD, as in a full decode."""
        before = self._decode(self._ids[self._context : self._settled])
        self._grow(self._decode(self._ids[self._context :])[len(before) :])

    def _grow(self, text: str) -> None:
        self.text += text
        self._context, self._settled = self._settled, len(self._ids)
        self._ends.append((len(self._ids), len(self.text)))
