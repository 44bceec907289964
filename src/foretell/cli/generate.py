"""`foretell generate`: answers prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import print_json, stderr
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.api import LLM, Completion
    from foretell.types import SamplingParams


def generate(
    ctx: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="Prompts; several make a batch, - reads stdin.")],
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    drafter_opt: opt.DrafterOptOpt = None,
    draft_tokens: opt.DraftTokensOpt = None,
    verify: opt.VerifyOpt = "coupled",
    max_tokens: opt.MaxTokensOpt = 256,
    temperature: opt.TemperatureOpt = 0.0,
    top_p: opt.TopPOpt = 1.0,
    top_k: opt.TopKOpt = 0,
    min_p: opt.MinPOpt = 0.0,
    seed: opt.SeedOpt = None,
    stop: opt.StopOpt = None,
    min_tokens: opt.MinTokensOpt = 0,
    logit_bias: opt.BiasOpt = None,
    repetition_penalty: opt.RepetitionOpt = 1.0,
    frequency_penalty: opt.FrequencyOpt = 0.0,
    presence_penalty: opt.PresenceOpt = 0.0,
    logprobs: opt.LogprobsOpt = None,
    n: opt.NOpt = 1,
    ignore_eos: opt.IgnoreEosOpt = False,
    json_object: opt.JsonObjectOpt = False,
    json_schema: opt.JsonSchemaOpt = None,
    regex: opt.RegexOpt = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model without chat template.")
    ] = False,
    as_json: opt.JsonOpt = False,
    device: opt.DeviceOpt = "auto",
    impl: opt.ImplOpt = "auto",
    weights: opt.WeightsOpt = "stored",
    allow_untested: opt.UntestedOpt = False,
    kv_tokens: opt.KvTokensOpt = None,
    kv: opt.KvOpt = "full",
    kv_budget: opt.KvBudgetOpt = None,
    lossless: opt.LosslessOpt = False,
    kv_profile: opt.KvProfileOpt = None,
    context_parallel: opt.RanksOpt = None,
) -> None:
    """Answer prompts, each token the model's own, several at a time where a draft allows it."""
    params = opt.sampling_params(ctx.params)
    if logprobs is not None and not as_json:
        raise InputError("logprobs are printed with --json only", hint="add --json")
    texts = _read(prompts)
    llm = opt.load_llm(ctx.params)
    ids = [llm.encode(text if raw else [{"role": "user", "content": text}]) for text in texts]
    if as_json:
        for completion in llm.generate(ids, params):
            print_json(to_json(llm, completion, with_logprobs=logprobs is not None))
    elif len(ids) == 1 and n == 1:
        _stream(llm, ids[0], params)
    else:
        for completion in llm.generate(ids, params):
            print(completion.text, end="\n\n")
            _footer(completion)


def _read(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise InputError("stdin can be read only once: - was given more than once")
    try:
        texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
        for text in texts:
            text.encode()
    except UnicodeError as error:
        raise InputError(f"the prompt is not UTF-8 text: {error}") from error
    if empty := [i for i, text in enumerate(texts, start=1) if not text.strip()]:
        raise InputError(f"prompt {empty[0]} is empty")
    return texts


def _stream(llm: LLM, ids: list[int], params: SamplingParams) -> None:
    with llm.stream(ids, params) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(flush=True)
        _footer(stream.completion)


def _footer(completion: Completion) -> None:
    stats = completion.stats
    line = (
        f"{len(completion.token_ids)} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.steps} steps, "
        f"AL {stats.al:.2f}, accepted {stats.accepted} of {stats.drafted} drafted, {completion.finish_reason}"
    )
    if not completion.lossless:
        line += ", LOSSY"
    stderr().print(line, style="dim")


def to_json(llm: LLM, completion: Completion, *, with_logprobs: bool) -> dict[str, Any]:
    """A completion as the JSON object of --json."""
    value: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "seed": completion.seed,
        "lossless": completion.lossless,
        "impl": completion.impl,
        "stats": completion.stats.to_json(),
    }
    if (ranks := llm.ranks) is not None:
        value["context_parallel"] = ranks
    if with_logprobs:
        value["logprobs"] = [
            {
                "token": llm.tokenizer.token(entry.token_id),
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [
                    {"token": llm.tokenizer.token(i), "token_id": i, "logprob": p}
                    for i, p in entry.top.items()
                ],
            }
            for entry in completion.logprobs
        ]
    return value
