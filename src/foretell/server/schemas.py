"""What clients send. Every field here has an effect; any other is refused by name.

Temperature is 1 where a client says nothing, as in OpenAI's interface. A field's range is checked by
`SamplingParams`. The shapes of `/stats` and of `foretell` in answers are in docs/serving.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foretell.errors import InputError
from foretell.server.forms import (
    Body,
    Call,
    NamedChoice,
    ResponseFormat,
    ToolChoice,
    ToolSpec,
    grammar_for,
)
from foretell.server.tools import Tool, choose, grammar_of
from foretell.types import Grammar, SamplingParams

DEFAULT_COMPLETION = 16  # OpenAI's max_tokens of a completion


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. `refusal`, `annotations`, `audio` and `function_call` are what OpenAI's clients send back
    with an answer: nothing."""

    role: str
    content: str | list[TextPart] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """For the chat template, pieces joined."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        told: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:
            told["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return told


class StreamOptions(Body):
    """`include_usage`: a last chunk tells what was used."""

    include_usage: bool = False


class Wishes(Body):
    """What only this server has. `tokens`: every chunk names its tokens and who proposed them; `top`: with
    their log-probabilities and so many alternatives; `draft` false: plain decoding, with the same text."""

    tokens: bool = False
    top: Annotated[int, Field(ge=0, le=20)] | None = None
    draft: bool = True


def _broken(value: Any) -> bool:
    """Whether JSON's escapes made half a character somewhere in it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
        return False
    if isinstance(value, dict):
        return any(_broken(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(_broken(item) for item in value if not isinstance(item, int))


class Sampled(Body):
    """Fields of both kinds of request. None = not given."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    foretell: Wishes = Wishes()

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """What is null is not given, whatever it is: clients send the fields of their libraries."""
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if _broken(name) or _broken(value):
                raise InputError(f"{name} is no UTF-8 text: it has half of a surrogate pair")
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name in needed}

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have; None = as many as fit."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities of so many alternatives are wanted; None = of no token."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be; None = anything.

        Raises:
            InputError: fields that contradict each other.
        """
        return None

    @property
    def constrained_by(self) -> str:
        """The field that a grammar comes from."""
        return "response_format"

    def params(self, room: int) -> SamplingParams:
        """How the answer is sampled.

        Args:
            room: tokens that the answer can have at most.

        Raises:
            InputError: a value out of range, or fields that contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options belongs to stream, which is not set")
        if self.foretell.top is not None and not self.foretell.tokens:
            raise InputError("foretell.top needs foretell.tokens to be true")
        wanted = [count for count in (self.alternatives, self.foretell.top) if count is not None]
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=room if self.limit is None else self.limit,
            min_tokens=self.min_tokens,
            stop=(*stop, *(self.stop_token_ids or ())),
            logit_bias=_bias(self.logit_bias or {}),
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logprobs=max(wanted, default=None),
            n=self.n,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar,
        )


class ChatRequest(Sampled):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @functools.cached_property
    def callable(self) -> tuple[list[Tool], bool]:
        """The functions that this answer may call, and whether it must call one.

        Raises:
            InputError: `tool_choice` names none of them, or two have one name.
        """
        tools = [spec.tool() for spec in self.tools or ()]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"tools: two functions are called {twice[0]!r}")
        choice = self.tool_choice or ("auto" if tools else "none")
        return choose(tools, choice.model_dump() if isinstance(choice, NamedChoice) else choice)

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        """See `Sampled`."""
        tools, must = self.callable
        form = grammar_for(self.response_format)
        if self.parallel_tool_calls is not None and not tools:
            raise InputError("parallel_tool_calls has no effect: no function may be called")
        if not tools:
            return form
        if form is not None:
            raise InputError("response_format cannot go with tools", hint="set tool_choice to none")
        named = isinstance(self.tool_choice, NamedChoice)
        return grammar_of(tools, must=must, several=self.parallel_tool_calls is not False and not named)

    @property
    def limit(self) -> int | None:
        """See `Sampled`; the newer name means the same."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InputError("max_tokens and max_completion_tokens differ", hint="give one of them")
        return both.pop() if both else None

    @property
    def alternatives(self) -> int | None:
        """See `Sampled`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def constrained_by(self) -> str:
        """See `Sampled`."""
        return "tools" if self.tools else "response_format"


class CompletionRequest(Sampled):
    """Body of `/v1/completions`: one prompt or several, as text or as token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = DEFAULT_COMPLETION
    logprobs: int | None = None

    @property
    def alternatives(self) -> int | None:
        """See `Sampled`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as a list."""
        given: Any = self.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return [given]
        return list(given)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are text; token ids are numbers."""
    if bad := [key for key in given if not (key.isascii() and key.isdigit())]:
        raise InputError(f"logit_bias must map token ids to numbers, got the key {bad[0]!r}")
    return {int(key): value for key, value in given.items()}
