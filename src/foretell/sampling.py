"""From logits to tokens: one path for the target and for drafts that sample.

Processors run in this order: logit bias, repetition / frequency / presence penalties, holding off end
tokens (min_tokens), grammar, temperature, top-k, top-p, min-p. They see the *hypothetical* prefix of the row
that they process, so a token inside a draft is penalised, filtered and biased as in plain decoding.
Filters keep all tokens that tie with the last one kept: the set is a function of the row alone.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from foretell.kernels import native_kernels
from foretell.noise import Stream, gumbel_tensor, make_key
from foretell.types import SamplingParams

_DEPTH_BITS = 16  # of a place in a draft
_NOISY = 64  # likeliest tokens among which a noisy ranking chooses
_LOOKS = (256, 2048, 16384)  # top-p looks among so many tokens before it sorts the whole row


def keyed_argmax(scores_V: Tensor, key: int) -> int:
    """argmax of scores + Gumbel noise of (key, token id): a sample of softmax(scores).

    Entries of -inf never win and get no noise.
    """
    native = native_kernels() if scores_V.device.type == "cpu" else None
    if native is not None:
        return native.keyed_argmax(scores_V, key)
    (ids,) = torch.where(scores_V > -torch.inf)
    return int(ids[(scores_V[ids].double() + gumbel_tensor(key, ids)).argmax()])


def keyed_top(scores_V: Tensor, key: int, count: int) -> list[int]:
    """The `count` largest of scores + noise: draws without replacement, in order (Gumbel top-k)."""
    if count == 1:
        return [keyed_argmax(scores_V, key)]
    (ids,) = torch.where(scores_V > -torch.inf)
    noisy = scores_V[ids].double() + gumbel_tensor(key, ids)
    return [int(i) for i in ids[noisy.topk(min(count, len(ids))).indices]]


def top_log_probs(scores_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of softmax(scores), or all: log-probabilities and ids, likeliest first."""
    count = min(count, len(scores_V))
    native = native_kernels() if scores_V.device.type == "cpu" else None
    if native is not None:
        return native.top(scores_V, count)
    top = (scores_V - scores_V.logsumexp(0)).topk(count)
    return top.values, top.indices


def filter_scores(scores_V: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p; what is filtered out becomes -inf.

    Args:
        scores_V: float32 logits; not changed.
        params: with temperature > 0.
    """
    scores_V = scores_V / params.temperature
    if 0 < params.top_k < len(scores_V):
        kth = scores_V.topk(params.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < kth, -torch.inf)
    if params.top_p < 1:
        scores_V = scores_V.masked_fill(scores_V < _nucleus_floor(scores_V, params.top_p), -torch.inf)
    if params.min_p > 0:
        scores_V = scores_V.masked_fill(scores_V < scores_V.max() + math.log(params.min_p), -torch.inf)
    return scores_V


def _nucleus_floor(scores_V: Tensor, top_p: float) -> Tensor:
    """The lowest score among the most likely tokens whose mass reaches `top_p`."""
    total = scores_V.double().logsumexp(0)
    sizes = [size for size in _LOOKS if size < len(scores_V)]
    for count in (*sizes, len(scores_V)):
        top = scores_V.topk(count).values
        mass = (top.double() - total).exp().cumsum(0)
        reached = int((mass < top_p).sum())  # tokens before the one that reaches it
        if reached < count:
            return top[reached]
    return top[-1]


class Constraint(Protocol):
    """Which tokens may come next, going by those of the answer so far."""

    def fork(self) -> Constraint:
        """One of its own for another list of tokens."""
        ...

    def restrict(self, scores_V: Tensor, answer: Sequence[int]) -> None:
        """Sets tokens that may not follow `answer` to -inf, in place. Behind an answer that is not allowed
        itself everything stays as it is: nobody reaches that place."""
        ...


class Sampler:
    """How one request turns logits into tokens.

    Args:
        params: the request's parameters.
        tokens: its prompt and what it has emitted, a list that the engine lets grow.
        prompt_length: where the output begins in `tokens`.
        seed: the resolved seed.
        end_ids: tokens that `min_tokens` holds off.
        draft_stream: noise that sampled drafts are drawn with.
        needs_q: whether the verification rule reads what drafts were drawn from.
        constraint: what the answer must be; None = anything.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        prompt_length: int,
        seed: int,
        end_ids: Iterable[int] = (),
        *,
        draft_stream: Stream = Stream.TARGET,
        needs_q: bool = True,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._end_ids = sorted(end_ids)
        self._draft_stream = draft_stream
        self._needs_q = needs_q
        self._constraint = constraint
        self._penalties = _Penalties(params, tokens, prompt_length) if _penalises(params) else None

    def fork(self, tokens: list[int]) -> Sampler:
        """The same over another list of tokens, which begins with the same prompt."""
        return Sampler(
            self.params,
            tokens,
            self._prompt_length,
            self.seed,
            self._end_ids,
            draft_stream=self._draft_stream,
            needs_q=self._needs_q,
            constraint=None if self._constraint is None else self._constraint.fork(),
        )

    @property
    def length(self) -> int:
        """Tokens of the request so far: the absolute position of the next one."""
        return len(self._tokens)

    @property
    def untouched(self) -> bool:
        """Whether the target's token is just the argmax of its logits, here and further on."""
        return self.params.greedy and not self.adjusts(0)

    def scores(self, logits_V: Tensor, ahead: Sequence[int] = ()) -> Tensor:
        """Processed log-weights [V] of the token after the emitted ones and `ahead`.

        Not normalised; -inf where filtered. Greedy rows get no temperature or filter.
        """
        scores_V = logits_V.float()
        if self.adjusts(len(ahead)):
            scores_V = self._adjust(scores_V.clone(), ahead)
        return scores_V if self.params.greedy else filter_scores(scores_V, self.params)

    def choose(self, logits_V: Tensor, ahead: Sequence[int] = ()) -> int:
        """The target's own token after `ahead`, with the noise of its position."""
        scores_V = self.scores(logits_V, ahead)
        if self.params.greedy:
            return int(scores_V.argmax())
        return keyed_argmax(scores_V, make_key(self.seed, Stream.TARGET, self.length + len(ahead)))

    def probs(self, logits_V: Tensor, ahead: Sequence[int] = ()) -> Tensor:
        """Processed probabilities [V], float64; greedy is one-hot."""
        scores_V = self.scores(logits_V, ahead)
        if self.params.greedy:
            probs_V = torch.zeros(scores_V.shape, dtype=torch.float64, device=scores_V.device)
            probs_V[scores_V.argmax()] = 1
            return probs_V
        return scores_V.double().softmax(0)

    def draw(self, logits_V: Tensor, ahead: Sequence[int], count: int) -> tuple[list[int], Tensor | None]:
        """`count` different draft tokens after `ahead`, the preferred first, from a draft's logits.

        Greedy: the most likely. Otherwise drawn without replacement from the processed distribution, with
        the target's noise (which makes them meet the target's choice more often) or with noise of their
        own. Fewer, or none, where all else that the draft could say is filtered out. The log-probabilities
        [V] that they were drawn from come along where the rule reads them.
        """
        scores_V = self.scores(logits_V, ahead)
        if self.params.greedy:
            top = scores_V.topk(min(count, len(scores_V)))
            return top.indices[top.values > -math.inf].tolist(), None
        if self._constraint is not None and scores_V.max() == -math.inf:
            return [], None
        key = make_key(self.seed, self._draft_stream, self._draft_place(len(ahead)))
        drawn = keyed_top(scores_V, key, count)
        return drawn, scores_V.double().log_softmax(0) if self._needs_q else None

    def rank(
        self, logits_V: Tensor, ahead: Sequence[int], count: int, ids_V: Tensor | None = None
    ) -> list[tuple[int, float]]:
        """The `count` tokens that the target will most likely choose after `ahead`, going by a draft's
        logits, each with the log of that confidence.

        A function of the request's state and of the noise that the target will use where the rule allows
        it; never random, so the draft is deterministic. With noise the choice is among the likeliest
        tokens, and the confidence is the softmax of their noisy scores: without noise that is the
        probability itself. Fewer, or none, where all else that the draft could say is filtered out.

        Args:
            ids_V: the tokens that the logits are of, where they are of some only; not where `adjusts`.
        """
        assert ids_V is None or not self.adjusts(len(ahead))
        scores_V = self.scores(logits_V, ahead)
        if self._constraint is not None and scores_V.max() == -math.inf:
            return []
        noisy = not self.params.greedy and self._draft_stream == Stream.TARGET
        values, ids = top_log_probs(scores_V, max(count, _NOISY) if noisy else count)
        values, ids = values.double(), ids if ids_V is None else ids_V[ids]
        if noisy:
            values = values + gumbel_tensor(make_key(self.seed, Stream.TARGET, self.length + len(ahead)), ids)
            values = values.log_softmax(0)
            order = values.argsort(descending=True)[:count]
            values, ids = values[order], ids[order]
        return [ranked for ranked in zip(ids.tolist(), values.tolist(), strict=True) if ranked[1] > -math.inf]

    def _draft_place(self, ahead: int) -> int:
        """What a draft's noise is keyed by. Noise of its own must be new in every step: how much of a draft
        is kept says something about it, so a position that is drafted again would not be drawn from q."""
        if self._draft_stream == Stream.TARGET:
            return self.length + ahead
        return (self.length << _DEPTH_BITS) + ahead

    def adjusts(self, ahead: int) -> bool:
        """Whether anything but temperature and filters applies after `ahead` hypothetical tokens."""
        held_off = self.length - self._prompt_length + ahead < self.params.min_tokens
        limited = self._penalties is not None or self._constraint is not None
        return bool(self.params.logit_bias) or limited or held_off

    def _adjust(self, scores_V: Tensor, ahead: Sequence[int]) -> Tensor:
        """Bias, penalties, held-off end tokens and grammar, in place. Ids beyond the row do not apply to it:
        a draft's vocabulary may be padded less."""
        params, size = self.params, len(scores_V)
        bias = {token: value for token, value in params.logit_bias.items() if token < size}
        if bias:
            index = torch.tensor(list(bias), device=scores_V.device)
            scores_V[index] += torch.tensor(list(bias.values()), device=scores_V.device, dtype=scores_V.dtype)
        if self._penalties is not None:
            self._penalties.apply(scores_V, ahead)
        if self.length - self._prompt_length + len(ahead) < params.min_tokens:
            scores_V[[token for token in self._end_ids if token < size]] = -torch.inf
        if self._constraint is not None:
            self._constraint.restrict(scores_V, [*self._tokens[self._prompt_length :], *ahead])
        return scores_V


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or bool(params.frequency_penalty or params.presence_penalty)


class _Penalties:
    """Repetition, frequency and presence penalties; only tokens that occurred are touched.

    Counts of the output follow the request's tokens, also when a stop string takes some back.
    """

    def __init__(self, params: SamplingParams, tokens: list[int], prompt_length: int) -> None:
        self._params = params
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._prompt_ids = set(tokens[:prompt_length])
        self._counts: Counter[int] = Counter()
        self._counted = prompt_length

    def apply(self, scores_V: Tensor, ahead: Sequence[int]) -> None:
        """Penalises `scores_V` in place, with `ahead` as part of the output."""
        if self._counted > len(self._tokens):
            self._counts, self._counted = Counter(), self._prompt_length
        self._counts.update(self._tokens[self._counted :])
        self._counted = len(self._tokens)
        counts = self._counts + Counter(ahead) if ahead else self._counts
        params, size, device = self._params, len(scores_V), scores_V.device
        if params.repetition_penalty != 1:
            seen = [token for token in self._prompt_ids | counts.keys() if token < size]
            index = torch.tensor(seen, dtype=torch.int64, device=device)
            values = scores_V[index]
            factor = torch.where(values > 0, 1 / params.repetition_penalty, params.repetition_penalty)
            scores_V[index] = values * factor
        if params.frequency_penalty or params.presence_penalty:
            known = [(token, count) for token, count in counts.items() if token < size]
            index = torch.tensor([token for token, _ in known], dtype=torch.int64, device=device)
            number = torch.tensor([count for _, count in known], dtype=scores_V.dtype, device=device)
            scores_V[index] -= params.frequency_penalty * number + params.presence_penalty
