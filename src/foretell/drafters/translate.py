"""Between two vocabularies: what a target's tokens are for a draft model, and the way back.

`SameVocabulary` is the usual case. `TokenMap` lets a draft of another family propose the tokens that both
vocabularies have (token-level intersection, TLI: Timor et al. 2025, algorithm 4), byte strings being
compared; what only the target has reaches the draft in pieces. Neither can change an answer: a draft
without mass on a token merely never proposes it.

Shape suffixes: R rows, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.tokenizer import Piece, Tokenizer


class Translation(Protocol):
    """A draft's view of a target's tokens."""

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Draft ids of a whole text."""
        ...

    def more(self, tokens: Sequence[int]) -> list[int]:
        """Draft ids of tokens that follow a text, each on its own."""
        ...

    def scores(self, logits_U: Tensor) -> Tensor:
        """The draft's logits over target ids [V], or over the first of them; -inf = cannot be drafted."""
        ...

    def log_q(self, log_q_V: Tensor) -> Tensor:
        """Log-probabilities over all target ids [V], from ones of the width of `scores`."""
        ...


class SameVocabulary:
    """Both have the same ids, but for padding.

    Args:
        shared: ids that both have; logits beyond are padding.
        draft_size, target_size: widths of their logits.
    """

    def __init__(self, shared: int, draft_size: int, target_size: int) -> None:
        self._shared, self._draft_size = shared, draft_size
        self._padding = target_size - shared

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The ids themselves; a padded target can emit others, which the draft reads as id 0."""
        return [token if token < self._draft_size else 0 for token in tokens]

    def more(self, tokens: Sequence[int]) -> list[int]:
        """As `prompt`."""
        return self.prompt(tokens)

    def scores(self, logits_U: Tensor) -> Tensor:
        """The shared logits."""
        return logits_U[: self._shared]

    def log_q(self, log_q_V: Tensor) -> Tensor:
        """Padded with -inf."""
        return F.pad(log_q_V, (0, self._padding), value=-torch.inf)


class TokenMap:
    """The tokens that two vocabularies have in common, and pieces for the others.

    Attributes:
        draft_ids, target_ids: the tokens in common, in the same order.
    """

    def __init__(self, draft: Tokenizer, target: Tokenizer, target_size: int, device: torch.device) -> None:
        self._draft, self._target, self._size = draft, target, target_size
        ours, theirs = draft.pieces(), target.pieces()
        self._theirs = theirs
        self._draft_of = {
            piece: token for token, piece in reversed(list(enumerate(ours))) if piece is not None
        }
        target_of = {piece: token for token, piece in reversed(list(enumerate(theirs))) if piece is not None}
        both = [(own, target_of[piece]) for piece, own in self._draft_of.items() if piece in target_of]
        both.sort()
        self.draft_ids = torch.tensor([own for own, _ in both], dtype=torch.int64, device=device)
        self.target_ids = torch.tensor([other for _, other in both], dtype=torch.int64, device=device)
        self._known: dict[int, list[int]] = {}

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The text between special tokens, as the draft would read it."""
        ids: list[int] = []
        run: list[int] = []
        for token in tokens:
            piece = self._theirs[token] if token < len(self._theirs) else None
            if piece is not None and not piece.special:
                run.append(token)
                continue
            ids += self._text(run) + self._one(token)
            run = []
        return ids + self._text(run)

    def more(self, tokens: Sequence[int]) -> list[int]:
        """Token by token, so that what was read stays read."""
        return [own for token in tokens for own in self._one(token)]

    def scores(self, logits_U: Tensor) -> Tensor:
        """The common tokens' logits at their target ids."""
        scores_V = logits_U.new_full((self._size,), -torch.inf)
        scores_V[self.target_ids] = logits_U[self.draft_ids]
        return scores_V

    def log_q(self, log_q_V: Tensor) -> Tensor:
        """They have all ids already."""
        return log_q_V

    def to_target(self, draft_ids: Sequence[int]) -> list[int]:
        """Target ids of text that the draft has written."""
        text = self._draft.decode(draft_ids)
        return self._target.encode(text.removesuffix("\ufffd"), special=False)

    def _text(self, tokens: Sequence[int]) -> list[int]:
        return self._draft.encode(self._target.decode(tokens), special=False) if tokens else []

    def _one(self, token: int) -> list[int]:
        """Draft ids of one target token: the same token, or its text, or its bytes, as far as the draft has
        them."""
        if token not in self._known:
            piece = self._theirs[token] if token < len(self._theirs) else None
            if piece is None:
                self._known[token] = []
            elif piece in self._draft_of:
                self._known[token] = [self._draft_of[piece]]
            else:
                self._known[token] = self._pieces(piece.data)
        return self._known[token]

    def _pieces(self, data: bytes) -> list[int]:
        try:
            return self._draft.encode(data.decode(), special=False)
        except UnicodeDecodeError:
            singles = (Piece(bytes([byte]), special=False) for byte in data)
            return [self._draft_of[single] for single in singles if single in self._draft_of]
