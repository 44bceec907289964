"""The nouns that every folder shares. Frozen: a step hands them on, nobody edits them.

Vocabulary of speculation: the *draft* is the tree of proposed tokens, the *verdict* what the target
makes of it; *accepted* tokens are draft tokens that the target kept, the *next token* is the target's
own (it replaces the first rejected one, or is the bonus after a full match). AL, the acceptance
length, is 1 + accepted / drafts: tokens per verification that had a draft.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from foretell.errors import GrammarError, InputError

MIN_TEMPERATURE = 1e-4  # below, scores divided by it leave fp32
FinishReason = str  # "stop" (end token or stop string), "length", "abort", "error"
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "ebnf", "structural_tag")
_LONGEST_GRAMMAR = 1 << 18


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise InputError(f"{name} must be {want}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be, from its first character to its last. Checked on construction, as far as that
    goes without a tokenizer.

    Args:
        kind: "json_object" (any JSON object), "json_schema", "regex", "ebnf" (GBNF, as llama.cpp has it), or
            "structural_tag" (xgrammar's: text with marked parts of given forms).
        source: the schema or the tags as JSON text, the expression, or the rules with a rule `root`; empty
            for "json_object".

    Raises:
        InputError: naming the field, the value and what would be right.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        try:
            self._check()
        except InputError as error:
            raise GrammarError(error.message) from None

    def _check(self) -> None:
        _require(self.kind in GRAMMAR_KINDS, "grammar.kind", self.kind, f"one of {', '.join(GRAMMAR_KINDS)}")
        _require(isinstance(self.source, str), "grammar.source", self.source, "text")
        size = len(self.source)
        _require(
            size <= _LONGEST_GRAMMAR, "grammar.source", f"{size} characters", f"at most {_LONGEST_GRAMMAR}"
        )
        if self.kind == "json_object":
            _require(not self.source, "grammar.source", self.source, "empty for json_object")
            return
        _require(bool(self.source.strip()), "grammar.source", self.source, f"a {self.kind}, not empty")
        if self.kind in ("json_schema", "structural_tag"):
            try:
                schema = json.loads(self.source)
            except (ValueError, RecursionError) as error:
                raise InputError(f"grammar.source must be a {self.kind}, but is no JSON: {error}") from None
            _require(isinstance(schema, dict), "grammar.source", schema, f"a {self.kind}, which is an object")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's tokens are chosen. Checked on construction.

    Args:
        temperature: 0 = greedy.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the most likely tokens that reach this mass, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: 0 .. 2^63 - 1; None draws one, which the result reports.
        max_tokens: tokens to emit at most.
        min_tokens: end tokens and stops are held off until so many are emitted.
        stop: strings, ids, or a mix; a string ends the text before its first occurrence, an id ends
            it and is not emitted as text.
        logit_bias: added to the logits of these ids.
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL rule).
        frequency_penalty, presence_penalty: subtracted per occurrence in, or presence in, the output.
        logprobs: report each emitted token's log-probability and this many alternatives; None = off.
        n: answers per prompt; answer i uses a seed derived from (seed, i).
        ignore_eos: go on past the model's end tokens.
        grammar: what the answer must be; it ends where the grammar does, or at `max_tokens`.

    Raises:
        InputError: naming the field, the value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str | int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._settle()
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in ("top_k", "max_tokens", "min_tokens", "n"):
            _require(_is_int(getattr(self, name)), name, getattr(self, name), "an integer")
        ok = self.temperature == 0 or self.temperature >= MIN_TEMPERATURE
        _require(ok, "temperature", self.temperature, f"0 (greedy) or at least {MIN_TEMPERATURE}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or above")
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            _require(abs(getattr(self, name)) <= 2, name, getattr(self, name), "between -2 and 2")
        if self.seed is not None:
            ok = _is_int(self.seed) and 0 <= self.seed < 1 << 63
            _require(ok, "seed", self.seed, "an integer in 0 .. 2^63 - 1")
        if self.logprobs is not None:
            ok = _is_int(self.logprobs) and 0 <= self.logprobs <= 20
            _require(ok, "logprobs", self.logprobs, "an integer in 0 .. 20")
        for item in self.stop:
            ok = bool(item) if isinstance(item, str) else _is_int(item) and item >= 0
            _require(ok, "stop", item, "a non-empty string or a token id")
        for token, bias in self.logit_bias.items():
            ok = _is_int(token) and token >= 0 and _is_number(bias) and abs(bias) <= 100
            _require(ok, "logit_bias", {token: bias}, "token id -> number between -100 and 100")
        if self.grammar is not None:
            _require(isinstance(self.grammar, Grammar), "grammar", self.grammar, "a Grammar")
            _require(not self.ignore_eos, "ignore_eos", True, "false with a grammar, which ends the answer")
            _require(
                self.min_tokens == 0, "min_tokens", self.min_tokens, "0 with a grammar, which ends the answer"
            )

    def _settle(self) -> None:
        """Takes a single stop for a list of one, and copies what the caller could still change."""
        stop: object = self.stop
        if isinstance(stop, (str, int)):
            stop = (stop,)
        _require(isinstance(stop, Iterable) and not isinstance(stop, bytes), "stop", stop, "strings and ids")
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "token id -> number")
        object.__setattr__(self, "stop", tuple(stop))  # type: ignore[arg-type]
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def without_effect(self) -> list[str]:
        """What was set and changes nothing, in words."""
        reasons = []
        if self.greedy:
            unset = {"seed": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n": 1}
            for name, value in unset.items():
                if getattr(self, name) != value:
                    why = "all answers are the same" if name == "n" else "nothing is drawn"
                    reasons.append(f"{name} has no effect: temperature is 0, {why}")
        return reasons

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed, checked like any other."""
        return replace(self, **changes)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(item for item in self.stop if isinstance(item, str))

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(item for item in self.stop if not isinstance(item, str))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants to see of the target's forward pass.

    Args:
        last_hidden: hidden states after the final norm.
        aux_layers: residual stream entering these layers.
        choices: the target's likeliest token at every node of the draft.
        queries: rotated queries of these layers, to compute attention from.
        prompts: all rows of a prompt; after a prefix hit it would do other things.
    """

    last_hidden: bool = False
    aux_layers: tuple[int, ...] = ()
    choices: bool = False
    queries: tuple[int, ...] = ()
    prompts: bool = False

    @property
    def again(self) -> int:
        """Tokens at the end of a found prefix whose states are needed anew: what a head makes of a state
        depends on the token behind it, and that is another one."""
        return int(self.last_hidden or bool(self.aux_layers))

    def __or__(self, other: Needs) -> Needs:
        """Both together."""
        mine, others = (self.aux_layers, self.queries), (other.aux_layers, other.queries)
        layers, queries = (tuple(sorted({*a, *b})) for a, b in zip(mine, others, strict=True))
        last, choices = self.last_hidden or other.last_hidden, self.choices or other.choices
        return Needs(last, layers, choices, queries, self.prompts or other.prompts)


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens as a tree; a chain is a tree, plain decoding an empty one.

    Args:
        tokens: proposed tokens; a parent comes before its children, earlier siblings are tried first.
        parents: index of each token's parent; -1 = the request's last token.
        log_q: None where the tokens were chosen deterministically. Otherwise entry p + 1 holds the
            log-probabilities [V] from which the children of token p were drawn without replacement,
            exactly as they were drawn (None where p has no children).
        confidence: for every token, the drafter's own chance that it and all before it are kept; None =
            it has no opinion. Never above the parent's.
        origin: which of several drafters it comes from; what they are worth is counted apart.
        whole: the drafter needs the target's answer at every node, so none may be left out.
        levels: how many levels of drafting it went through; a drafter of several may leave some out.
        passes: of a drafter that goes token by token and has stopped where a further pass would not pay
            (`StepPlan.pass_worth`); 0 = of another one.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_q: tuple[Tensor | None, ...] | None = None
    confidence: tuple[float, ...] | None = None
    origin: int = 0
    whole: bool = False
    levels: int = 1
    passes: int = 0

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "one parent per token"
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), "parents first"

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """Children of `node` (-1 = the root), in the order in which they are tried."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """1 for a child of the root."""
        depth = 0
        while node >= 0:
            node, depth = self.parents[node], depth + 1
        return depth

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


EMPTY_TREE = DraftTree()


def chain(tokens: Sequence[int], log_q: Sequence[Tensor] | None = None) -> DraftTree:
    """A tree without branches; `log_q[i]` is what token i was drawn from."""
    rows = None if log_q is None else (*log_q, None)
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), rows)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target makes of a draft.

    Args:
        path: accepted nodes from the root down.
        next_token: the target's own token after them.
        lossless: whether the rule leaves the target's distribution unchanged.
    """

    path: tuple[int, ...]
    next_token: int
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How far to speculate in one step, and why.

    Args:
        draft_tokens: nodes that the draft may have; 0 = none.
        reason: in words.
        free_tokens: nodes that it may have where drafting costs next to nothing, if that is more.
        worth: nodes that are less likely to be kept would not be verified; a drafter may leave them out.
        pass_worth: a further pass of a drafter that goes token by token does not pay below nodes that are all
            less likely to be kept than this.
        direct: of a drafter with several levels, the lowest drafts for the target alone.
    """

    draft_tokens: int
    reason: str
    free_tokens: int = 0
    worth: float = 0.0
    pass_worth: float = 0.0
    direct: bool = False
