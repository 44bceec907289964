"""Options that several verbs share. Defaults come from the library's own dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.types import Grammar, SamplingParams

ModelOpt = Annotated[
    str,
    typer.Option("--model", "-m", help="Catalogue name, folder, .gguf file or hub id.", show_default=True),
]
DrafterOpt = Annotated[
    str,
    typer.Option("--drafter", help="NAME[:MODEL_OR_PATH]; see `foretell drafters`.", show_default=True),
]
DrafterOptOpt = Annotated[
    list[str] | None,
    typer.Option("--drafter-opt", help="KEY=VALUE of the drafter; repeatable; see `foretell drafters`."),
]
DraftTokensOpt = Annotated[
    int | None,
    typer.Option("--draft-tokens", help="Draft so many tokens always.  [default: as far as it pays]"),
]
VerifyOpt = Annotated[
    str, typer.Option("--verify", help="Acceptance rule; see `foretell drafters`.", show_default=True)
]
DeviceOpt = Annotated[str, typer.Option("--device", help="auto, cpu or cuda[:N].", show_default=True)]
ImplOpt = Annotated[
    str, typer.Option("--impl", help="Who runs the graph: auto, decoder (own) or hf.", show_default=True)
]
WeightsOpt = Annotated[
    str, typer.Option("--weights", help="How weights are kept: stored, fp32, fp16, int8.", show_default=True)
]
UntestedOpt = Annotated[
    bool, typer.Option("--allow-untested", help="Run architectures that have no parity test.")
]
KvTokensOpt = Annotated[
    int | None, typer.Option("--kv-tokens", help="Tokens that the KV cache holds.  [default: 16384]")
]
KvOpt = Annotated[
    str,
    typer.Option(
        "--kv",
        help="Which keys decoding reads: full, or LOSSY: streaming, snapkv, h2o, quest, dustin.",
        show_default=True,
    ),
]
KvBudgetOpt = Annotated[
    int | None, typer.Option("--kv-budget", help="Tokens of its history that a step reads.  [default: 512]")
]
RanksOpt = Annotated[
    int | None,
    typer.Option(
        "--context-parallel",
        help="Spread the KV cache over so many ranks; --kv-tokens is for each.  [default: 1, or torchrun's]",
    ),
]
LosslessOpt = Annotated[
    bool, typer.Option("--lossless", help="With --kv: a full pass verifies what few keys let through.")
]
RepeatsOpt = Annotated[int, typer.Option("--repeats", help="Repetitions.", show_default=True, min=1)]
KvProfileOpt = Annotated[
    Path | None,
    typer.Option("--kv-profile", help="Heads that dustin asks, by `foretell profile`.  [default: shipped]"),
]
MaxTokensOpt = Annotated[int, typer.Option("--max-tokens", help="Tokens to emit at most.", show_default=True)]
MinTokensOpt = Annotated[int, typer.Option("--min-tokens", help="Tokens before the answer may end.")]
TemperatureOpt = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", show_default=True)]
TopKOpt = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
TopPOpt = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens of this mass.")]
MinPOpt = Annotated[float, typer.Option("--min-p", help="Keep tokens at least this likely beside the best.")]
SeedOpt = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")]
StopOpt = Annotated[list[str] | None, typer.Option("--stop", help="End before this string; repeatable.")]
BiasOpt = Annotated[list[str] | None, typer.Option("--logit-bias", help="TOKEN_ID=NUMBER; repeatable.")]
RepetitionOpt = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 discourages repeats.")]
FrequencyOpt = Annotated[float, typer.Option("--frequency-penalty", help="Subtracted per occurrence.")]
PresenceOpt = Annotated[float, typer.Option("--presence-penalty", help="Subtracted once a token occurred.")]
LogprobsOpt = Annotated[
    int | None, typer.Option("--logprobs", help="Report this many alternatives per token.")
]
NOpt = Annotated[int, typer.Option("-n", help="Answers per prompt.")]
JsonObjectOpt = Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")]
JsonSchemaOpt = Annotated[
    Path | None, typer.Option("--json-schema", help="The answer is JSON that this file's schema describes.")
]
RegexOpt = Annotated[str | None, typer.Option("--regex", help="The whole answer matches this expression.")]
IgnoreEosOpt = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON, one object per result.")]


def parse_bias(entries: Sequence[str] | None) -> dict[int, float]:
    """TOKEN_ID=NUMBER entries as a mapping.

    Raises:
        InputError: an entry has another form.
    """
    from foretell.errors import InputError

    bias = {}
    for entry in entries or ():
        token, equals, value = entry.partition("=")
        try:
            if not equals:
                raise ValueError
            bias[int(token)] = float(value)
        except ValueError:
            raise InputError(f"logit_bias must look like TOKEN_ID=NUMBER, got {entry!r}") from None
    return bias


_LLM_OPTIONS = (
    "drafter",
    "draft_tokens",
    "verify",
    "device",
    "impl",
    "weights",
    "allow_untested",
    "kv_tokens",
    "max_batch",
    "kv",
    "kv_budget",
    "lossless",
    "kv_profile",
)


def load_llm(given: Mapping[str, Any]) -> LLM:
    """The `LLM` of a verb's options (`ctx.params`), with a progress bar while its model is fetched or
    converted. Options that the verb does not have keep their defaults."""
    from foretell.api import LLM
    from foretell.cli.console import model_progress
    from foretell.drafters import parse_entries
    from foretell.parallel.team import under_torchrun, world_size

    values = {name: given[name] for name in _LLM_OPTIONS if name in given}
    asked = given.get("context_parallel")
    if asked is not None or under_torchrun():
        values["context_parallel"] = (world_size() or 1) if asked is None else asked
    values["drafter_options"] = parse_entries(given.get("drafter_opt") or ())
    with model_progress() as report:
        return LLM(given["model"], **values, report=report)


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The `SamplingParams` of a verb's options (`ctx.params`)."""
    from dataclasses import fields

    from foretell.types import SamplingParams

    values = {item.name: given[item.name] for item in fields(SamplingParams) if item.name in given}
    if "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    if "logit_bias" in values:
        values["logit_bias"] = parse_bias(values["logit_bias"])
    return SamplingParams(**values, grammar=_grammar(given))


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    """What a verb's options ask the answer to be.

    Raises:
        InputError: they ask for several things, or the file cannot be read.
    """
    from foretell.errors import InputError
    from foretell.types import Grammar

    asked = [name for name in ("json_object", "json_schema", "regex") if given.get(name) not in (None, False)]
    if not asked:
        return None
    if len(asked) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise InputError(f"{flags} exclude each other")
    (kind,), value = asked, given[asked[0]]
    if kind != "json_schema":
        return Grammar(kind, "" if kind == "json_object" else value)
    try:
        return Grammar(kind, value.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise InputError(f"json_schema {value} cannot be read: {error}") from error
