"""What an answer must be, and what it may call: `response_format`, `tools` and messages that hold calls, in
OpenAI's shapes, as grammars and prompts.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.server.tools import Tool
from foretell.types import Grammar

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Body(BaseModel):
    """Strict: a number is no string, and what is unknown is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Function(Body):
    """A function. `strict` says what holds in any case: arguments follow the schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        """For prompts and grammars."""
        return Tool.of(self.function.model_dump())


class NamedFunction(Body):
    """A function by name."""

    name: str


class NamedChoice(Body):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """What was called. `arguments` is JSON."""

    name: str
    arguments: str


class Call(Body):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema. `strict` says what holds in any case: the answer follows it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    name: Name
    of: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Body):
    """Text that an expression matches as a whole. Not OpenAI's."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    """Text that a grammar describes (GBNF). Not OpenAI's."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def grammar_for(form: ResponseFormat | None) -> Grammar | None:
    """What a `response_format` demands.

    Raises:
        InputError: it is empty, or too long.
    """
    match form:
        case ObjectFormat():
            return Grammar("json_object")
        case SchemaFormat():
            return Grammar("json_schema", json.dumps(form.json_schema.of))
        case RegexFormat():
            return Grammar("regex", form.regex)
        case GrammarFormat():
            return Grammar("ebnf", form.grammar)
        case _:
            return None
