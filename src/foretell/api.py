"""The library: load a model, generate, stream, chat.

    from foretell import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=20))[0].text)

An `LLM` belongs to the thread that made it.
"""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from foretell.drafters import Drafter, DrafterContext, LayeredDrafter, build_drafter, parse
from foretell.drafters.spec import Part, origins_of
from foretell.engine import Chunk, Engine, Request, TokenLogprob
from foretell.errors import InputError, RankError
from foretell.grammar import GrammarCompiler
from foretell.models.catalog import DEFAULT_MODEL, Report
from foretell.models.load import LoadedModel, load_model
from foretell.models.tokenizer import Message
from foretell.parallel.model import ShardedModel
from foretell.parallel.spread import ranks_of, spread
from foretell.parallel.team import TIMEOUT, check_ranks
from foretell.planner import AdaptivePlanner, FixedPlanner, Planner, load_or_measure
from foretell.reading import Reading, settle
from foretell.sparse import Profile
from foretell.stats import StepStats
from foretell.types import FinishReason, SamplingParams
from foretell.verify import RULES, Rule

# text as it is; token ids; or a conversation, which goes through the model's chat template
Prompt = str | Sequence[SupportsIndex] | Sequence[Message]

DEFAULT_KV_TOKENS = 16384
PREFILL_CHUNK = 512  # tokens of a prompt that each rank reads in a step
_LOADING = {"device": "auto", "impl": "auto", "weights": "stored", "allow_untested": False}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Args:
        text, token_ids: the answer; ids include an end token that the model chose, text does not.
        finish_reason: "stop" (end token or stop string), "length" or "abort".
        prompt_tokens: length of the prompt.
        seed: the seed that reproduces it.
        lossless: whether every token keeps the target's distribution.
        impl: which code ran the target ("decoder" or "hf").
        logprobs: per token, if they were asked for.
        stats: what speculation did.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    lossless: bool
    impl: str
    logprobs: list[TokenLogprob]
    stats: StepStats


class Stream(Iterator[Chunk]):
    """An answer while it is made: iterate over its chunks, then read `completion`.

    Closing it (or leaving its `with` block, or forgetting it) before the end aborts the request and frees
    its slots. Several streams of one `LLM` may be read in turn; each advances all of them.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm = llm
        self._request = request
        self._abort = weakref.finalize(self, llm.engine.abort, request)

    def __next__(self) -> Chunk:
        while not self._request.has_news:
            if self._request.error is not None:  # also where another stream's step met it
                raise self._request.error
            if self._request.finish_reason is not None:
                raise StopIteration
            self._llm.step([self._request])
        return self._request.take()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request if it is not finished."""
        self._abort()

    @property
    def completion(self) -> Completion:
        """The whole answer.

        Raises:
            ValueError: it is not finished yet.
        """
        if self._request.finish_reason is None:
            raise ValueError("the stream has not ended")
        return self._llm._completion(self._request)


class LLM:
    """A model with a drafter.

    Args:
        model: catalogue name, folder, .gguf file or hub id; or a model that another LLM has loaded
            (`llm.loaded`), which then shares it.
        drafter: NAME or NAME:ARGUMENT, several joined by + (see `foretell drafters`), or a `Drafter`.
        drafter_options: the named drafter's own options.
        draft_tokens: draft so many tokens always; None = as far as measurement says that it pays.
        adaptive: False = without measurement, as many as suit the drafter; so it is in any case under rules
            whose text depends on the draft.
        verify: acceptance rule; see `foretell.verify.RULES`.
        device, impl, weights, allow_untested: see `foretell.models.load.load_model`.
        kv_tokens: tokens that the KV cache holds over all running requests; None = 16384.
        max_batch: requests that run at once.
        kv: which keys decoding reads: "full", or a policy of `foretell.sparse.POLICIES`, which is lossy.
        kv_budget: with a policy, how many tokens of its history a step reads; None = 512.
        lossless: with a policy, what it lets through is only a draft: a full pass verifies `draft_tokens` of
            its tokens at once.
        kv_profile: file of the layers and heads that `dustin` goes by (see `foretell profile`); None = a
            shipped one, where one was found for these models.
        context_parallel: spread the KV cache over so many ranks: processes on this machine, which are started
            now, or those that torchrun started. `kv_tokens` is what one rank holds. On all but rank 0 of
            torchrun this constructor does not return: it serves rank 0, then ends the process.
        rank_timeout: seconds that a rank may take for its part of an exchange.
        report: called with (what, done, total) while a model is fetched or converted.

    Attributes:
        origins: who proposed a token, by `Chunk.origins`.

    Raises:
        InputError: a bad argument, or a model or drafter that cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel = DEFAULT_MODEL,
        *,
        drafter: str | Drafter = "auto",
        drafter_options: Mapping[str, Any] | None = None,
        draft_tokens: int | None = None,
        adaptive: bool = True,
        verify: str = "coupled",
        device: str = "auto",
        impl: str = "auto",
        weights: str = "stored",
        allow_untested: bool = False,
        kv_tokens: int | None = None,
        max_batch: int = 16,
        kv: str = "full",
        kv_budget: int | None = None,
        lossless: bool = False,
        kv_profile: str | os.PathLike[str] | Profile | None = None,
        context_parallel: int = 1,
        rank_timeout: float = TIMEOUT,
        report: Report | None = None,
    ) -> None:
        check_ranks(context_parallel, rank_timeout)
        rule, options = RULES[verify], dict(drafter_options or {})
        _at_least("draft_tokens", draft_tokens, 0)
        _at_least("kv_tokens", kv_tokens, 1)
        _at_least("max_batch", max_batch, 1)
        parts = _parts(drafter, options)
        reading = settle(kv, kv_budget, lossless, kv_profile, parts)
        loading = {"device": device, "impl": impl, "weights": weights, "allow_untested": allow_untested}
        self.loaded = _load(model, loading, report)
        if context_parallel > 1:
            self.loaded = spread(self.loaded, context_parallel, rank_timeout)
        if drafter == "none" and draft_tokens and not (reading.policy and lossless):
            _log.warning("draft_tokens has no effect: the drafter is none")
        self.tokenizer = self.loaded.tokenizer
        ranks = ranks_of(self.loaded.model)
        slots = (kv_tokens or DEFAULT_KV_TOKENS) * ranks
        if isinstance(drafter, str):
            context = self._context(slots, rule, reading, allow_untested, report)
            drafter = build_drafter(drafter, options, context)
        self.max_batch = max_batch
        self.origins = origins_of(parts, drafter)
        drafter, reader = reading.levels(self.loaded, drafter, rule)
        self.engine = Engine(
            self.loaded.model,
            drafter,
            rule,
            self._planner(drafter, rule, draft_tokens, adaptive),
            decode=self.tokenizer.decode,
            constrain=GrammarCompiler(self.tokenizer, self.loaded.model.vocab_size, self.loaded.end_ids),
            kv_slots=slots,
            max_batch=max_batch,
            prefill_chunk=PREFILL_CHUNK * ranks,
            reader=reader,
        )

    @property
    def ranks(self) -> dict[str, Any] | None:
        """Where the cache is spread over ranks: how many, bytes of keys and values of each, tokens that
        fit on all, and the bytes that rank 0 has sent so far, by purpose; None = one process."""
        model, arena = self.loaded.model, self.engine.cache.arena
        if not isinstance(model, ShardedModel):
            return None
        held = arena.keys_LKSD.nbytes + arena.values_LKSD.nbytes
        sent = dict(model.rank.group.sent)
        return {"ranks": model.ranks, "kv_bytes_per_rank": held, "kv_tokens": arena.slots, "sent_bytes": sent}

    def _context(
        self, slots: int, rule: Rule, reading: Reading, allow_untested: bool, report: Report | None
    ) -> DrafterContext:
        """What a drafter is built from."""
        return DrafterContext(
            self.loaded.model,
            self.tokenizer,
            slots,
            self.loaded.folder,
            learning=rule.invariant,
            allow_untested=allow_untested,
            report=report,
            name=self.loaded.name,
            kv_profile=reading.profile,
        )

    def _planner(self, drafter: Drafter, rule: Rule, draft_tokens: int | None, adaptive: bool) -> Planner:
        """Measured, unless the length is given, or a draft of another length would change the text."""
        if draft_tokens is not None or not (drafter.draft_tokens and rule.invariant and adaptive):
            return FixedPlanner(drafter.draft_tokens if draft_tokens is None else draft_tokens)
        # how fast several ranks are together is nothing to keep: it depends on who else runs on the machine
        alone = ranks_of(self.loaded.model) == 1
        table = load_or_measure(self.loaded.model, self.loaded.folder if alone else None)
        direct = drafter.direct_tokens if isinstance(drafter, LayeredDrafter) else 0
        return AdaptivePlanner(table, drafter.draft_tokens, direct)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers one prompt or several, all of them as one batch.

        Args:
            prompts: text as it is, token ids, or a conversation (messages with role and content, which go
                through the chat template); or a sequence of these.
            params: for all, or one per prompt.

        Returns:
            `n` completions per prompt, in order.

        Raises:
            InputError: before anything runs, if one of the prompts is unusable.
        """
        listed = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise InputError(f"params: {len(params)} given for {len(listed)} prompts")
        requests = self._submit_all(listed, params)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step(requests)
        except BaseException:
            self._abort(requests)
            raise
        return [self._completion(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Answers one prompt piece by piece.

        Raises:
            InputError: now, not at the first chunk.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InputError(f"n must be 1 for a stream, got {params.n}")
        (request,) = self._submit_all([prompt], [params])
        return Stream(self, request)

    def step(self, requests: Sequence[Request]) -> None:
        """One step of the engine, on behalf of these requests.

        Raises:
            Exception: what one of them failed by; the failure of others is theirs to tell.
        """
        try:
            self.engine.step()
        except RankError:
            raise
        except Exception as error:
            if error not in self.engine.failures:
                raise
        for request in requests:
            if request.error is not None:
                raise request.error

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind.

        Raises:
            InputError: it is none of text, ids, and messages.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            items: list[Any] = list(prompt)
            if items and all(isinstance(item, Mapping) for item in items):
                return self.tokenizer.encode(self.tokenizer.render(items), special=False)
            return [operator.index(item) for item in items]
        except TypeError:
            got = f"{type(prompt).__name__} {prompt!r}"[:80]
            raise InputError(f"a prompt must be text, token ids, or messages, got {got}") from None

    def _submit_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids = self.encode(prompt)
                for answer in range(each.n):
                    requests.append(self.engine.submit(ids, each, self.loaded.end_ids, answer))
        except BaseException:
            self._abort(requests)
            raise
        for reason in dict.fromkeys(reason for each in params for reason in self.without_effect(each)):
            _log.warning("%s", reason)
        return requests

    def without_effect(self, params: SamplingParams) -> list[str]:
        """Settings that change nothing, with these parameters and this rule."""
        reasons, rule = params.without_effect(), self.engine.rule
        if not rule.draws and not params.greedy:
            for name, unset in (("seed", None), ("n", 1)):
                if getattr(params, name) != unset:
                    reasons.append(f"{name} has no effect: the rule {rule.name} draws nothing")
        return reasons

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            prompt_tokens=request.prompt_length,
            seed=request.seed,
            lossless=request.lossless,
            impl=self.loaded.model.impl,
            logprobs=request.logprobs,
            stats=request.stats,
        )


def _load(
    model: str | os.PathLike[str] | LoadedModel, loading: Mapping[str, Any], report: Report | None
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load_model(os.fspath(model), **loading, report=report)
    if any(loading[name] != unset for name, unset in _LOADING.items()):
        raise InputError("device, impl, weights and allow_untested belong to loading; the model is loaded")
    return model


def _parts(drafter: str | Drafter, options: Mapping[str, Any]) -> list[Part]:
    """The drafters of a specification; of a ready one nothing is known."""
    if isinstance(drafter, str):
        return parse(drafter, options)
    if options:
        raise InputError("drafter_options belong to a drafter's name, but a Drafter was given")
    return []


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    one = isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence)
    if not one and not prompts:
        raise InputError("no prompts were given")
    one = one or all(isinstance(item, Mapping) or hasattr(item, "__index__") for item in prompts)
    return [prompts] if one else list(prompts)  # type: ignore[list-item,arg-type]
