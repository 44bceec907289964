"""A request's life: waiting, running, finished."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.cache import Lease
from foretell.engine.detokenize import Detokenizer
from foretell.sampling import Sampler
from foretell.stats import StepStats
from foretell.types import FinishReason, SamplingParams, StepPlan

PLAIN = StepPlan(0, "the request wants no drafts")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability of an emitted token, before any processor, and of the likeliest
    alternatives (id -> log-probability, the likeliest first)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to one request.

    Args:
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        origins: for each new token, which drafter had proposed it, counted from 0; -1 = none had.
        places: for each new token, its place among those of its step, from 1: of a drafted one the depth
            in its draft.
        finish_reason: set in the last chunk.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    places: tuple[int, ...]
    finish_reason: FinishReason | None = None

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For each new token, whether a drafter had proposed it."""
        return tuple(origin >= 0 for origin in self.origins)


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        tokens: prompt and emitted tokens.
        capacity: slots that it can come to need: prompt, answer, and a draft behind them.
        origins, places: for each emitted token, see `Chunk`.
        drafts: whether it may have any.
        lossless: whether every verdict so far was.
        plan: of its last step that could have had a draft.
        error: what ended it with the reason "error".
        turn, passed, waited, begun, made_way: the scheduler's: its place in the queue, requests that passed
            it there, steps that it waited for slots, whether it has read anything since it was admitted,
            and whether it gave its slots to one that had waited too long.
        shown, handed: characters and tokens that have been handed out; `closed`: the end too.
    """

    id: int
    params: SamplingParams
    prompt_length: int
    tokens: list[int]
    capacity: int
    end_ids: frozenset[int]
    sampler: Sampler
    detokenizer: Detokenizer | None
    seed: int
    drafts: bool = True
    lease: Lease | None = None
    finish_reason: FinishReason | None = None
    text: str = ""
    lossless: bool = True
    shown: int = 0
    handed: int = 0
    closed: bool = False
    origins: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: StepStats = field(default_factory=StepStats)
    plan: StepPlan | None = None
    error: Exception | None = None
    turn: int = 0
    passed: int = 0
    waited: int = 0
    begun: bool = False
    made_way: bool = False

    @property
    def drafted(self) -> list[bool]:
        """For each emitted token, whether a drafter had proposed it."""
        return [origin >= 0 for origin in self.origins]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - self.emitted

    @property
    def unread(self) -> int:
        """Tokens that the target has not read yet: one in decoding, more while the prompt is read."""
        assert self.lease is not None
        return len(self.tokens) - self.lease.length

    def emit(self, token_id: int, logits_V: Tensor, origin: int, place: int) -> FinishReason | None:
        """Adds one token of the target, `origin` and `place` as in `Chunk`; returns why the answer ends with
        it, if it does.

        What belongs to a stop string and what comes after it is taken back: text, ids and
        log-probabilities alike.
        """
        self.tokens.append(token_id)
        self.origins.append(origin)
        self.places.append(place)
        if self.params.logprobs is not None:
            self.logprobs.append(_logprob(logits_V, token_id, self.params.logprobs))
        if token_id in self.end_ids:
            return "stop"
        if self.detokenizer is not None:
            known = len(self.text)
            self.detokenizer.push(token_id)
            self.text = self.detokenizer.text
            if self.emitted >= self.params.min_tokens and self._cut_at_stop(known):
                return "stop"
        return "length" if self.remaining == 0 else None

    def finish(self, reason: FinishReason) -> None:
        """Settles the text: bytes that never became a character are part of it now."""
        self.finish_reason = reason
        if self.detokenizer is not None and len(self.text) == len(self.detokenizer.text):
            self.detokenizer.flush()
            self.text = self.detokenizer.text

    @property
    def has_news(self) -> bool:
        """Whether `take` would hand something out that it has not yet."""
        text, ids = self._certain()
        return text > self.shown or ids > self.handed or (self.finish_reason is not None and not self.closed)

    def take(self) -> Chunk:
        """Text and tokens that have become certain since the last call. While the end of the text may
        be the beginning of a stop string, it and its tokens are held back."""
        text, ids = self._certain()
        chunk = Chunk(
            self.id,
            self.text[self.shown : text],
            tuple(self.output_ids[self.handed : ids]),
            tuple(self.origins[self.handed : ids]),
            tuple(self.places[self.handed : ids]),
            self.finish_reason,
        )
        self.shown, self.handed = text, ids
        self.closed = self.finish_reason is not None
        return chunk

    def _certain(self) -> tuple[int, int]:
        """Characters and tokens that no stop string can take back any more."""
        held = 0 if self.finish_reason else self._held_back()
        text, ids = len(self.text) - held, self.emitted
        if held and self.detokenizer is not None:
            ids = self.detokenizer.ids_for(text)
        return max(text, self.shown), max(ids, self.handed)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        stops = self.params.stop_strings
        longest = max((len(stop) for stop in stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in stops):
                return size
        return 0

    def _cut_at_stop(self, known: int) -> bool:
        """Ends text, ids and log-probabilities before the first stop string that reaches beyond the
        first `known` characters."""
        places = []
        for stop in self.params.stop_strings:
            if (at := self.text.find(stop, max(0, known - len(stop) + 1))) >= 0:
                places.append(at)
        if not places:
            return False
        assert self.detokenizer is not None
        self.text = self.text[: min(places)]
        kept = self.detokenizer.ids_for(len(self.text))
        del self.tokens[self.prompt_length + kept :]
        del self.origins[kept:], self.places[kept:], self.logprobs[kept:]
        return True


def _logprob(logits_V: Tensor, token_id: int, count: int) -> TokenLogprob:
    row_V = torch.log_softmax(logits_V.float(), -1)
    top = row_V.topk(count)
    alternatives = {int(i): float(p) for i, p in zip(top.indices, top.values, strict=True)}
    return TokenLogprob(token_id, float(row_V[token_id]), alternatives)
