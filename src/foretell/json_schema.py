"""Which JSON schemas a grammar enforces to the letter. xgrammar takes most others too and leaves out what it
does not know; here that is an error, found by comparing its grammars with a validator
(tests/test_json_schema.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.errors import GrammarError

FORMATS = (
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
_DEEPEST = 64
_LARGEST_FACTOR = 1024
_DEFINITIONS = ("$defs", "definitions")
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", *_DEFINITIONS),
}
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_TYPE: Mapping[str, set[str]] = {
    "object": {
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {*_RANGE, "multipleOf"},
    "number": _RANGE,
    "boolean": set(),
    "null": set(),
}
_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")  # nothing else is enforced beside one of these
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "null": (type(None),),
}  # fmt: skip
_SHAPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties", *_DEFINITIONS), (dict,)),
    **dict.fromkeys(("required", "prefixItems", "anyOf", "allOf", "enum"), (list,)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    "multipleOf": (int, float),
}


def check_schema(schema: Any, place: str = "json_schema", depth: int = 0, *, kind: str | None = None) -> None:
    """Refuses what would not be enforced.

    Args:
        schema: a schema or a part of one.
        place: of the part, for messages.
        kind: the type of what it describes, where that is known without saying.

    Raises:
        GrammarError: it names the part and the keyword.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError(f"{place} must be a schema, got {schema!r}"[:200])
    if depth > _DEEPEST:
        raise GrammarError(f"json_schema is nested deeper than {_DEEPEST} levels")
    allowed = _NOTES | _keywords(schema, place, kind)
    for keyword in schema:
        if keyword not in allowed:
            hint = "anyOf says the same where only one can hold" if keyword == "oneOf" else _hint(keyword)
            raise GrammarError(f"{place}: {keyword!r} cannot be enforced here", hint=hint)
    _check_values(schema, place)
    for where, part in _parts(schema):
        own = "string" if where.endswith("propertyNames") else None
        check_schema(part, f"{place}.{where}", depth + 1, kind=own)


def check_regex(pattern: str, place: str = "regex") -> None:
    """Refuses anchors inside an expression: the whole answer matches in any case, and there they would be
    left out.

    Raises:
        GrammarError: it names the place.
    """
    inside, depth, last = False, 0, len(pattern) - 1
    for match in re.finditer(r"\\.|.", pattern, re.S):
        char, position = match[0], match.start()
        if inside:
            inside = char != "]"
            continue
        inside = char == "["
        depth += (char == "(") - (char == ")")
        first = position == 0 or (pattern[position - 1] == "|" and depth == 0)
        ends = position == last or (pattern[position + 1] == "|" and depth == 0)
        if (char == "^" and not first) or (char == "$" and not ends):
            raise GrammarError(f"{place}: {char!r} at character {position + 1} cannot be enforced there")


def _hint(keyword: str) -> str | None:
    kinds = [kind for kind, known in _OF_TYPE.items() if keyword in known]
    return f'{keyword!r} needs "type": {" or ".join(kinds)}' if kinds else None


def _keywords(schema: Mapping[str, Any], place: str, kind: str | None) -> set[str]:
    """Keywords that are enforced beside those that say what kind of schema it is."""
    alone = [keyword for keyword in _ALONE if keyword in schema]
    if alone:
        return {alone[0], "type"} if alone[0] in ("enum", "const") else {alone[0]}
    types = schema.get("type", kind or _implied(schema))
    listed = types if isinstance(types, list) else [types] if types is not None else []
    if bad := [each for each in listed if not isinstance(each, str) or each not in _OF_TYPE]:
        raise GrammarError(f"{place}: type must be of {', '.join(_OF_TYPE)}, got {bad[0]!r}")
    return {"type"}.union(*(_OF_TYPE[each] for each in listed))


def _implied(schema: Mapping[str, Any]) -> str | None:
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else None


def _check_values(schema: Mapping[str, Any], place: str) -> None:
    """Values that are taken, and not enforced."""
    for keyword, value in schema.items():
        shape = _SHAPES.get(keyword)
        if shape is not None and (not isinstance(value, shape) or isinstance(value, bool)):
            raise GrammarError(f"{place}: {keyword} has a wrong value, {value!r}"[:300])
    wrong = {
        "$ref": re.fullmatch("#|#/.*", schema.get("$ref", "#")) is None,
        "allOf": len(schema.get("allOf", [{}])) != 1,
        "uniqueItems": bool(schema.get("uniqueItems")),
        "format": schema.get("format", FORMATS[0]) not in FORMATS,
        "multipleOf": schema.get("multipleOf", 1) > _LARGEST_FACTOR
        or ("multipleOf" in schema and "number" in schema["type"]),
    }
    for keyword, is_wrong in wrong.items():
        if is_wrong:
            raise GrammarError(f"{place}: {keyword} {schema[keyword]!r} cannot be enforced"[:300])
    _check_together(schema, place)
    properties = schema.get("properties", {})
    if absent := [name for name in schema.get("required", ()) if name not in properties]:
        raise GrammarError(f"{place}: required {absent[0]!r} is not among the properties")
    for pattern in schema.get("patternProperties", {}):
        if twice := [name for name in properties if _finds(pattern, name, place)]:
            raise GrammarError(f"{place}: property {twice[0]!r} is one of patternProperties too")
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", {})):
        check_regex(pattern, f"{place}: pattern {pattern!r}")
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if "type" in schema and (bad := [value for value in values if not _is(value, schema["type"])]):
        raise GrammarError(f"{place}: {bad[0]!r} is not of type {schema['type']!r}")


def _check_together(schema: Mapping[str, Any], place: str) -> None:
    """Keywords of which one is left out beside the other."""
    lengths = "minLength" in schema or "maxLength" in schema
    for one, other, both in (
        ("pattern", "a length", "pattern" in schema and lengths),
        ("format", "a length or a pattern", "format" in schema and (lengths or "pattern" in schema)),
        (
            "propertyNames",
            "named properties",
            "propertyNames" in schema and bool({"properties", "patternProperties"} & schema.keys()),
        ),
    ):
        if both:
            raise GrammarError(f"{place}: {one} and {other} cannot both be enforced")


def _is(value: Any, types: str | Sequence[str]) -> bool:
    """Whether a value is of one of these types."""
    listed = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in listed
    return any(isinstance(value, _PYTHON.get(each, ())) for each in listed)


def _finds(pattern: str, name: str, place: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise GrammarError(f"{place}: patternProperties {pattern!r} is no expression: {error}") from None


def _parts(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Schemas inside a schema, with their places."""
    found: list[tuple[str, Any]] = []
    for keyword in ("properties", "patternProperties", *_DEFINITIONS):
        found += [(f"{keyword}.{name}", part) for name, part in schema.get(keyword, {}).items()]
    for keyword in ("prefixItems", "anyOf", "allOf"):
        found += [(f"{keyword}[{i}]", part) for i, part in enumerate(schema.get(keyword, ()))]
    singles = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")
    return found + [(keyword, schema[keyword]) for keyword in singles if keyword in schema]
