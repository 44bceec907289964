"""The library: load a model, generate, stream, chat.

from foretell import LLM, SamplingParams

llm = LLM("smollm2-135m", drafter="ngram")
print(llm.generate("The capital of France is", SamplingParams(max_tokens=20))[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.drafters import DrafterContext, build_drafter, check_drafter
from foretell.engine import Chunk, Engine, Request, TokenLogprob
from foretell.errors import InputError
from foretell.models.catalog import DEFAULT_MODEL, Report
from foretell.models.load import LoadedModel, load_model
from foretell.models.tokenizer import Message
from foretell.planner import FixedPlanner
from foretell.types import FinishReason, SamplingParams, StepStats
from foretell.verify import RULES

Prompt = str | Sequence[int]  # text, or token ids

DEFAULT_DRAFT_TOKENS = 8
_DEFAULT_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Args:
        text, token_ids: the answer; ids include an end token that the model chose, text does not.
        finish_reason: "stop" (end token or stop string), "length" or "abort".
        prompt_tokens: length of the prompt.
        seed: the seed that reproduces it.
        lossless: whether the verification rule keeps the target's distribution.
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


class LLM:
    """A model with a drafter.

    Args:
        model: catalogue name, folder, .gguf file or hub id; or a model that another LLM has loaded
            (`llm.loaded`), which then shares it.
        drafter: NAME or NAME:ARGUMENT; see `foretell.drafters.DRAFTERS`.
        drafter_options: the drafter's own options.
        draft_tokens: draft length.
        verify: acceptance rule; see `foretell.verify.RULES`.
        device, impl, allow_untested: see `foretell.models.load.load_model`.
        kv_tokens: tokens that the KV cache holds over all running requests; None = 16384, or the
            model's context if that is more memory-friendly.
        max_batch: requests that run at once.
        report: called with (what, done, total) while a model is fetched or converted.

    Raises:
        InputError: a bad argument, or a model or drafter that cannot be loaded.
    """

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        *,
        drafter: str = "ngram",
        drafter_options: Mapping[str, Any] | None = None,
        draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        verify: str = "coupled",
        device: str = "auto",
        impl: str = "auto",
        allow_untested: bool = False,
        kv_tokens: int | None = None,
        max_batch: int = 16,
        report: Report | None = None,
    ) -> None:
        rule = RULES[verify]
        options = dict(drafter_options or {})
        check_drafter(drafter, options)
        for name, value, least in (
            ("draft_tokens", draft_tokens, 0),
            ("max_batch", max_batch, 1),
            ("kv_tokens", kv_tokens, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        if isinstance(model, str):
            model = load_model(model, device=device, impl=impl, allow_untested=allow_untested, report=report)
        self.loaded = model
        self.tokenizer = self.loaded.tokenizer
        slots = _DEFAULT_SLOTS if kv_tokens is None else kv_tokens
        context = DrafterContext(self.loaded.model, self.tokenizer, slots)
        self.engine = Engine(
            self.loaded.model,
            build_drafter(drafter, options, context),
            rule,
            FixedPlanner(draft_tokens),
            decode=self.tokenizer.decode,
            kv_slots=slots,
            max_batch=max_batch,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers raw prompts, all of them as one batch.

        Args:
            prompts: one or several, each text or token ids.
            params: for all, or one per prompt.

        Returns:
            `n` completions per prompt, in order.

        Raises:
            InputError: before anything runs, if one of the prompts is unusable.
        """
        listed = _as_prompts(prompts)
        each = (
            [params or SamplingParams()] * len(listed)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(listed):
            raise InputError(f"params: {len(each)} given for {len(listed)} prompts")
        requests = self._submit_all(listed, each)
        try:
            while any(request.finish_reason is None for request in requests):
                self.engine.step()
        except BaseException:
            self._abort(requests)
            raise
        return [self._completion(request) for request in requests]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Answers one conversation or several, through the model's chat template."""
        listed = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self.generate([self.chat_prompt(messages) for messages in listed], params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks."""
        return self.tokenizer.encode(self.tokenizer.render(messages), special=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk | Completion]:
        """Answers one prompt piece by piece; the last item is the `Completion`.

        Closing the iterator aborts the request.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InputError(f"n must be 1 for a stream, got {params.n}")
        (request,) = self._submit_all([prompt], [params])
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Chunk | Completion]:
        try:
            while request.finish_reason is None:
                yield from (chunk for chunk in self.engine.step() if chunk.request_id == request.id)
        finally:
            self.engine.abort(request)
        yield self._completion(request)

    def _submit_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                for answer in range(each.n):
                    requests.append(self.engine.submit(ids, each, self.loaded.end_ids, answer))
        except BaseException:
            self._abort(requests)
            raise
        return requests

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
            lossless=self.engine.rule.lossless,
            impl=self.loaded.model.impl,
            logprobs=request.logprobs,
            stats=request.stats,
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]
