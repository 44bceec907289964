"""`foretell chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import stderr
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.types import SamplingParams

_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    ctx: typer.Context,
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    drafter_opt: opt.DrafterOptOpt = None,
    draft_tokens: opt.DraftTokensOpt = None,
    verify: opt.VerifyOpt = "coupled",
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: opt.MaxTokensOpt = 512,
    temperature: opt.TemperatureOpt = 0.0,
    top_p: opt.TopPOpt = 1.0,
    seed: opt.SeedOpt = None,
    device: opt.DeviceOpt = "auto",
    impl: opt.ImplOpt = "auto",
    weights: opt.WeightsOpt = "stored",
    allow_untested: opt.UntestedOpt = False,
    kv_tokens: opt.KvTokensOpt = None,
    kv: opt.KvOpt = "full",
    kv_budget: opt.KvBudgetOpt = None,
    lossless: opt.LosslessOpt = False,
    kv_profile: opt.KvProfileOpt = None,
) -> None:
    """Talk with a model; what was said before is not computed again."""
    params = opt.sampling_params(ctx.params)
    llm = opt.load_llm(ctx.params)
    try:
        importlib.import_module("readline")  # line editing and history for input()
    except ImportError:
        stderr().print("no line editing: this Python has no readline", style="dim")
    stderr().print(_HELP, style="dim")
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while (line := _ask()) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/"):
            stderr().print(f"unknown command {line.split()[0]}; {_HELP}", style="dim")
        elif line:
            messages.append({"role": "user", "content": line})
            _turn(llm, messages, params)


def _ask() -> str | None:
    """A line of the user; None at the end of input. Ctrl-C clears the line."""
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def _turn(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """Answers the last message and appends what was answered, also when it was stopped."""
    said = ""
    try:
        ids = llm.encode(messages)
        # a long conversation leaves less room for an answer than was asked for
        room = llm.loaded.model.max_context - len(ids)
        with llm.stream(ids, params.replace(max_tokens=max(1, min(params.max_tokens, room)))) as stream:
            for chunk in stream:
                said += chunk.text
                print(chunk.text, end="", flush=True)
            stats, lossless = stream.completion.stats, stream.completion.lossless
        print(flush=True)
        line = f"{stats.tokens_per_s:.1f} tokens/s, AL {stats.al:.2f}, reused {stats.reused}, room for {room}"
        stderr().print(line if lossless else f"{line}, LOSSY", style="dim")
    except KeyboardInterrupt:
        print(" [stopped]")
    except InputError as error:
        # the conversation stays usable: the message that did not fit is taken back
        messages.pop()
        stderr().print(f"error: {error.message} (/clear begins anew)", style="red")
        return
    messages.append({"role": "assistant", "content": said})
