"""`foretell chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import stderr

if TYPE_CHECKING:
    from foretell.api import LLM
    from foretell.types import SamplingParams

_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    ctx: typer.Context,
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "ngram",
    draft_tokens: opt.DraftTokensOpt = 8,
    verify: opt.VerifyOpt = "coupled",
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: opt.MaxTokensOpt = 512,
    temperature: opt.TemperatureOpt = 0.0,
    top_p: opt.TopPOpt = 1.0,
    seed: opt.SeedOpt = None,
    device: opt.DeviceOpt = "auto",
    impl: opt.ImplOpt = "auto",
    allow_untested: opt.UntestedOpt = False,
    kv_tokens: opt.KvTokensOpt = None,
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
    from foretell.engine import Chunk
    from foretell.errors import InputError

    said = ""
    try:
        for item in llm.stream(llm.chat_prompt(messages), params):
            if isinstance(item, Chunk):
                said += item.text
                print(item.text, end="", flush=True)
            else:
                stats = item.stats
                print(flush=True)
                stderr().print(
                    f"{stats.tokens_per_s:.1f} tokens/s, AL {stats.al:.2f}, reused {stats.reused}",
                    style="dim",
                )
    except KeyboardInterrupt:
        print(" [stopped]")
    except InputError as error:
        # the conversation stays usable: the message that did not fit is taken back
        messages.pop()
        stderr().print(f"error: {error.message}", style="red")
        return
    messages.append({"role": "assistant", "content": said})
