"""Function calls in the form that Hermes and Qwen models write: each is

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

within the text. A grammar keeps every call to this form and to its function's schema, so parsing cannot fail;
what an answer that ran into its limit has of a call is handed out as far as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import InputError
from foretell.models.tokenizer import Message, Tokenizer
from foretell.types import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(re.escape(OPEN) + r'\n{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_END = f"}}\n{CLOSE}"
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_TOLD = """You can call these functions; each line is one of them, with a JSON schema of its arguments:
{tools}
To call one, write
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Tool:
        """From the `function` of an entry of `tools`."""
        parameters = function.get("parameters") or _NO_ARGUMENTS
        return cls(function["name"], function.get("description") or "", parameters)

    def to_json(self) -> dict[str, Any]:
        """As an entry of `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def choose(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> tuple[list[Tool], bool]:
    """The functions that may be called under a `tool_choice`, and whether one must be.

    Raises:
        InputError: it names none of them, or there is none.
    """
    if choice == "none":
        return [], False
    if choice == "auto":
        return list(tools), False
    if not tools:
        raise InputError(f"tool_choice is {choice!r}, but no tools were given")
    if choice == "required":
        return list(tools), True
    name = choice["function"]["name"] if isinstance(choice, Mapping) else choice
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise InputError(
            f"tool_choice names {name!r}, which is no tool",
            hint=f"one of: {', '.join(t.name for t in tools)}",
        )
    return named, True


def grammar_of(tools: Sequence[Tool], *, must: bool, several: bool) -> Grammar:
    """Text with calls of these functions in it; where one must be called, calls and nothing else.

    Args:
        several: whether there may be more than one call.
    """
    tags = [
        {
            "type": "tag",
            "begin": f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": _END,
        }
        for tool in tools
    ]
    form: dict[str, Any] = {"tags": tags, "at_least_one": must, "stop_after_first": not several}
    form |= {"type": "tags_with_separator", "separator": "\n"} if must else {"type": "triggered_tags"}
    if not must:
        form["triggers"] = [OPEN]
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """The prompt of a conversation in which functions may be called. Chat templates that know this form of
    calls tell the model of them; with others, the first system message does.

    Args:
        messages: as clients send them: `content` may be missing where there are `tool_calls`.
    """
    template = tokenizer.chat_template or ""
    if "tools" in template and OPEN in template:
        told = [_with_arguments(message) for message in messages]
        return tokenizer.render(told, [tool.to_json() for tool in tools] or None)
    plain = [_as_text(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool.to_json()["function"], ensure_ascii=False) for tool in tools)
        text = _TOLD.format(tools=lines)
        if plain and plain[0]["role"] == "system":
            text = f"{plain.pop(0)['content']}\n\n{text}"
        plain.insert(0, {"role": "system", "content": text})
    return tokenizer.render(plain)


def _with_arguments(message: Message) -> dict[str, Any]:
    """Arguments as objects, which templates write as JSON themselves."""
    told = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        told["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls
        ]
    return told


def _as_text(message: Message) -> dict[str, Any]:
    """For a template that knows no calls: they are text of the assistant, results text of the user."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        said = json.dumps(
            {"name": call["function"]["name"], "arguments": _arguments(call)}, ensure_ascii=False
        )
        content += ("\n" if content else "") + f"{OPEN}\n{said}\n{CLOSE}"
    return {"role": message["role"], "content": content}


def _arguments(call: Mapping[str, Any]) -> Any:
    text = call["function"]["arguments"]
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(f"messages: a tool call's arguments must be JSON, got {text[:80]!r}") from None


@dataclass(slots=True)
class Delta:
    """What a piece of an answer adds: to its text, or to one of its calls.

    Args:
        call: which call, from 0; None = text.
        name: set where a call begins.
        text: text, or a piece of the call's arguments.
    """

    call: int | None
    text: str
    name: str | None = None


@dataclass(slots=True)
class CallReader:
    """Takes an answer apart while it comes: text and calls. However it was cut, the deltas say the same; line
    breaks around calls belong to nothing.

    Attributes:
        calls: how many have begun.
    """

    calls: int = 0
    _rest: str = ""
    _inside: bool = False  # whether `_rest` belongs to the arguments of the last call
    _said: str = ""  # of them
    _after: bool = False  # whether no text has come since the last call

    def push(self, text: str) -> list[Delta]:
        """What has become certain."""
        self._rest += text
        found: list[Delta] = []
        length = -1
        while length != len(self._rest):
            length = len(self._rest)
            found += self._arguments() if self._inside else self._text()
        return found

    def end(self) -> list[Delta]:
        """What is left where the answer ends, be it in the middle of a call."""
        rest, self._rest = self._rest, ""
        if self._inside:
            whole = _is_json(self._said)  # then what is left began to end the call
            return [Delta(self.calls - 1, rest)] if rest and not whole else []
        return self._say(rest)

    def _text(self) -> list[Delta]:
        if (at := self._rest.find(OPEN)) < 0:
            at = len(self._rest) - _overlap(self._rest, OPEN)
            at = len(self._rest[:at].rstrip("\n"))
            said, self._rest = self._say(self._rest[:at]), self._rest[at:]
            return said
        said, self._rest = self._say(self._rest[:at].rstrip("\n")), self._rest[at:]
        if (head := _HEAD.match(self._rest)) is None:
            return said
        self._rest, self._inside, self.calls = self._rest[head.end() :], True, self.calls + 1
        self._said = ""
        return [*said, Delta(self.calls - 1, "", json.loads(head[1]))]

    def _arguments(self) -> list[Delta]:
        index, at = self.calls - 1, self._rest.find(_END)
        if at < 0:
            at = len(self._rest) - _overlap(self._rest, _END)
            text, self._rest = self._rest[:at], self._rest[at:]
        else:
            text, self._rest = self._rest[:at], self._rest[at + len(_END) :]
            self._inside, self._after = False, True
        self._said += text
        return [Delta(index, text)] if text else []

    def _say(self, text: str) -> list[Delta]:
        if self._after:
            text = text.lstrip("\n")
        self._after = self._after and not text
        return [Delta(None, text)] if text else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _overlap(text: str, end: str) -> int:
    """Characters at the end of `text` that `end` may begin with."""
    return next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), 0)
