"""Grammars as masks over a model's vocabulary, by xgrammar (Dong et al. 2024), which is loaded when the
first grammar comes.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretell.errors import GrammarError, InputError
from foretell.json_schema import check_regex, check_schema
from foretell.models.tokenizer import Tokenizer
from foretell.types import Grammar

if TYPE_CHECKING:
    import xgrammar

_log = logging.getLogger(__name__)
_CACHE_BYTES = 1 << 28  # of compiled grammars
_DEEPEST = 64
_BLANKS = 32  # whitespace characters between two parts of JSON, at most: small models know no end to them


class GrammarMatcher:
    """See `Constraint`. Follows whatever answer it is asked about: what it has accepted of the one before is
    rolled back to where the two part."""

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, bits_W: Tensor, accepted: Sequence[int] = ()
    ) -> None:
        self._matcher = matcher
        self._bits_W = bits_W
        self._accepted = list(accepted)

    def fork(self) -> GrammarMatcher:
        """See `Constraint`."""
        return GrammarMatcher(self._matcher.fork(), self._bits_W.clone(), self._accepted)

    def restrict(self, scores_V: Tensor, answer: Sequence[int]) -> None:
        """See `Constraint`. Where the grammar can go on with no token of the vocabulary, the end tokens may
        come, so that the answer ends."""
        if not self._follow(list(answer)) or self._matcher.is_terminated():
            return
        if not self._matcher.fill_next_token_bitmask(self._bits_W[None]):
            return
        allowed = np.unpackbits(self._bits_W.numpy().view(np.uint8), bitorder="little")[: len(scores_V)]
        if not self._bits_W.numpy().any():
            _log.warning("no token of the model can go on with the grammar after %d tokens", len(answer))
            allowed[[token for token in self._matcher.stop_token_ids if token < len(scores_V)]] = 1
        scores_V.masked_fill_(torch.from_numpy(allowed == 0).to(scores_V.device), -torch.inf)

    def _follow(self, answer: list[int]) -> bool:
        """Brings the matcher behind `answer`; False where the grammar refuses a token of it."""
        common = min(len(answer), len(self._accepted))
        while self._accepted[:common] != answer[:common]:
            common -= 1
        if back := len(self._accepted) - common:
            self._matcher.rollback(back)
            del self._accepted[common:]
        for token in answer[common:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._accepted.append(token)
        return True


class GrammarCompiler:
    """Compiles grammars for one model; compiled ones are kept, up to 256 MB.

    Special tokens and ids without a token stand for nothing and are never allowed, but for the end tokens
    where the grammar may end.

    Args:
        tokenizer: the model's.
        vocabulary: width of its logits.
        end_ids: tokens that end its answers.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(token for token in end_ids if token < vocabulary)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._making = threading.Lock()  # requests compile on threads of their own

    def __call__(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        Raises:
            GrammarError: the grammar is malformed, asks for what cannot be enforced, or allows no answer;
                or the model has no end token.
            InputError: xgrammar is missing.
        """
        import_xgrammar()
        import xgrammar

        with self._making:
            if self._compiler is None:
                self._compiler = self._new_compiler()
        try:
            compiled = _compile(self._compiler, grammar)
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"the grammar ({grammar.kind}) cannot be used: {_reason(error)}") from None
        bits_W = xgrammar.allocate_token_bitmask(1, self._vocabulary)[0]
        matcher = xgrammar.GrammarMatcher(compiled)
        if matcher.fill_next_token_bitmask(bits_W[None]) and not bool(bits_W.any()):
            raise GrammarError(
                f"the grammar ({grammar.kind}) allows no answer: nothing can be its first token"
            )
        return GrammarMatcher(matcher, bits_W)

    def _new_compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        if not self._end_ids:
            raise GrammarError("a grammar needs a model with an end token; this one names none")
        pieces = self._tokenizer.pieces()[: self._vocabulary]
        texts = [b"" if piece is None or piece.special else piece.data for piece in pieces]
        info = xgrammar.TokenizerInfo(
            texts + [b""] * (self._vocabulary - len(texts)),
            xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary,
            stop_token_ids=self._end_ids,
        )
        return xgrammar.GrammarCompiler(
            info, max_threads=torch.get_num_threads(), cache_limit_bytes=_CACHE_BYTES
        )


def import_xgrammar() -> None:
    """Raises:
    InputError: it is not installed.
    """
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        raise InputError(
            "a grammar needs the package xgrammar, which is not installed",
            hint="pip install 'foretell[grammar]'",
        ) from None


def _reason(error: Exception) -> str:
    """xgrammar's message, without its place in the sources."""
    lines = str(error).strip().splitlines()
    return re.sub(r"^\[[0-9:]+\] \S+:\d+: ", "", lines[0]) if lines else type(error).__name__


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    _check(grammar)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.source)
    if grammar.kind == "ebnf":
        return compiler.compile_grammar(grammar.source)
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(grammar.source)
    if grammar.kind == "json_object":
        return compiler.compile_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=_BLANKS
        )
    return compiler.compile_json_schema(grammar.source, max_whitespace_cnt=_BLANKS)


@functools.lru_cache(maxsize=16)  # a server checks before its engine's thread does
def _check(grammar: Grammar) -> None:
    """Raises:
    GrammarError: it asks for what cannot be enforced.
    """
    if grammar.kind == "regex":
        check_regex(grammar.source)
    elif grammar.kind == "structural_tag":
        _check_tags(json.loads(grammar.source))
    elif grammar.kind == "json_schema":
        check_schema(json.loads(grammar.source))


def _check_tags(part: Any, depth: int = 0) -> None:
    """The schemas inside a structural tag.

    Raises:
        GrammarError: one of them cannot be enforced.
    """
    if depth > _DEEPEST:
        raise GrammarError(f"structural_tag is nested deeper than {_DEEPEST} levels")
    if isinstance(part, dict):
        if part.get("type") == "json_schema" and "json_schema" in part:
            check_schema(part["json_schema"])
        elif part.get("type") == "regex" and isinstance(part.get("pattern"), str):
            check_regex(part["pattern"])
        else:
            part = list(part.values())
    if isinstance(part, list):
        for each in part:
            _check_tags(each, depth + 1)
