"""Schemas against a validator: what a grammar lets through is valid, what it would not enforce is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import json_schema
from foretell.errors import InputError
from foretell.grammar import GrammarCompiler
from foretell.json_schema import check_regex, check_schema
from foretell.models.tokenizer import Piece
from foretell.types import Grammar

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

INT, S = {"type": "integer"}, {"type": "string"}


class Bytes:
    """A tokenizer of single bytes."""

    def pieces(self):
        return [None, Piece(b"</s>", True), *(Piece(bytes([i]), False) for i in range(256))]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Bytes(), 258, frozenset([1]))


def accepts(compiler, grammar: Grammar, text: str) -> bool:
    import torch

    matcher, ids = compiler(grammar), [byte + 2 for byte in text.encode()]
    if not matcher._follow(ids):
        return False
    scores = torch.zeros(258)
    matcher.restrict(scores, ids)
    return bool(scores[1] == 0)


# (schema, values): each value is let through just where the validator says so
ENFORCED = [
    ({"type": ["integer", "null"], "minimum": 3}, [1, 3, None, "a"]),
    ({"type": "integer", "multipleOf": 3, "minimum": 5, "maximum": 10}, [3, 6, 7, 9, 12]),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 5}, [3, 4, 5, 6]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1.5}, [0.5, 1, 0, 2, -0.5, 1.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "éüö", "abcd"]),
    ({"type": "string", "pattern": "^a+$|^b$"}, ["aa", "b", "ab", ""]),
    ({"type": "string", "format": "date"}, ["2020-01-02", "2020"]),
    ({"type": "array", "prefixItems": [INT], "minItems": 2, "items": S}, [[1], [1, "a"], [1, 2]]),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3], ["a"]]),
    (
        {"properties": {"a": INT, "b": S}, "required": ["b"], "additionalProperties": False},
        [{"a": 1, "b": "x"}, {"b": "x"}, {"a": 1}, {"b": "x", "c": 1}, {"a": "x", "b": "x"}],
    ),
    ({"properties": {"a": INT}, "additionalProperties": S}, [{"c": "x"}, {"c": 1}, {"a": "x"}]),
    ({"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}]),
    (
        {"type": "object", "patternProperties": {"^x.*$": S}, "properties": {"a": INT}},
        [{"a": 1}, {"xy": "x"}, {"xy": 1}],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, [{"a": 1}, {"b": 1}]),
    ({"enum": ["é", None, True, 5]}, ["é", None, True, False, 5, 6]),
    ({"type": "string", "const": 'a"b'}, ['a"b', "a"]),
    ({"anyOf": [INT, {"type": "null"}], "title": "X"}, [1, None, "a"]),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INT}}, [1, "a"]),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}, {"n": 1}]),
    ({"properties": {"a": INT}, "required": ["a"]}, [{"a": 1}, {}, {"a": "x"}]),
    ({"type": "object", "properties": {"a": {"type": "object"}}}, [{"a": {"x": [1]}}, {"a": 1}]),
    ({}, [1, "a", None, [1], {"a": {}}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "values"), ENFORCED, ids=[json.dumps(schema)[:60] for schema, _ in ENFORCED]
)
def test_a_grammar_lets_through_what_a_validator_does(schema, values, compiler):
    grammar = Grammar("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    found = {json.dumps(v): accepts(compiler, grammar, json.dumps(v, ensure_ascii=False)) for v in values}
    assert found == {json.dumps(v): validator.is_valid(v) for v in values}


def test_properties_that_are_not_named_are_not_written(compiler):
    """Stricter than the schema, which allows others: answers stay what was described."""
    grammar = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": INT}}))
    assert accepts(compiler, grammar, '{"a": 1}')
    assert not accepts(compiler, grammar, '{"a": 1, "b": 2}')
    assert accepts(compiler, Grammar("json_object"), '{"a": 1, "b": {"c": [true, null]}}')
    assert not accepts(compiler, Grammar("json_object"), "[1]")


def test_whitespace_has_an_end(compiler):
    assert accepts(compiler, Grammar("json_object"), "{\n" + " " * 8 + '"a" : 1\n}')
    assert not accepts(compiler, Grammar("json_object"), "{" + " " * 40 + '"a": 1}')


REFUSED = [
    ({"oneOf": [INT, {"type": "number"}]}, "json_schema: 'oneOf' cannot be enforced here (anyOf"),
    ({"not": INT}, "json_schema: 'not' cannot be enforced"),
    ({"type": "integer", "if": {"minimum": 3}}, "'if' cannot be enforced"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' cannot"),
    ({"type": "array", "contains": INT}, "'contains' cannot"),
    ({"type": "array", "items": INT, "uniqueItems": True}, "uniqueItems True cannot"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf' cannot be enforced here ('multipleOf' needs"),
    ({"type": "integer", "multipleOf": 4096}, "multipleOf 4096 cannot"),
    ({"type": "string", "format": "int32"}, "format 'int32' cannot"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "pattern and a length cannot both"),
    ({"type": "string", "format": "date", "pattern": "^x$"}, "format and a length or a pattern cannot both"),
    ({"type": "string", "pattern": "a^b"}, "'^' at character 2 cannot"),
    ({"properties": {"a": INT}, "type": "object", "propertyNames": {"pattern": "^b$"}}, "propertyNames and"),
    ({"type": "object", "properties": {"a": INT}, "patternProperties": {"^a": S}}, "property 'a' is one of"),
    ({"type": "object", "required": ["a"]}, "required 'a' is not among the properties"),
    ({"minimum": 3}, "'minimum' cannot be enforced here ('minimum' needs \"type\": integer or number)"),
    ({"$ref": "http://example.org/x"}, "$ref 'http://example.org/x' cannot"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INT}}, "'minimum' cannot"),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "'type' cannot be enforced here"),
    ({"allOf": [INT, {"minimum": 3}]}, "allOf"),
    ({"enum": [1, 5], "minimum": 3}, "'minimum' cannot"),
    ({"type": "string", "enum": ["a", 1]}, "1 is not of type 'string'"),
    ({"type": "string", "nullable": True}, "'nullable' cannot"),
    ({"type": "frob"}, "type must be of object"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}},
     "json_schema.properties.a.items: 'not' cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_would_not_be_enforced_is_refused_by_name(schema, message, compiler):
    with pytest.raises(InputError) as caught:
        compiler(Grammar("json_schema", json.dumps(schema)))
    assert message in str(caught.value)


def test_refusing_is_needed():
    """xgrammar itself takes these and leaves the keyword out; when that changes, the list can shrink."""
    import xgrammar

    info = xgrammar.TokenizerInfo([b"", b"</s>", *(bytes([i]) for i in range(256))], stop_token_ids=[1])
    raw = xgrammar.GrammarCompiler(info, max_threads=1)
    for schema, value in (
        ({"not": INT}, 1),
        ({"type": "array", "items": INT, "uniqueItems": True}, [1, 1]),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, "a"),
        ({"enum": [1, 5], "minimum": 3}, 1),
        ({"minimum": 3}, 1),
    ):
        matcher = xgrammar.GrammarMatcher(raw.compile_json_schema(json.dumps(schema)))
        assert matcher.accept_string(json.dumps(value))
        assert matcher.is_completed()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
        ({"enum": []}, "enum array must not be empty"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "cannot accept any value"),
    ],
)
def test_a_schema_that_nothing_meets_is_refused(schema, message, compiler):
    with pytest.raises(InputError, match=r"the grammar \(json_schema\) cannot be used") as caught:
        compiler(Grammar("json_schema", json.dumps(schema)))
    assert message in str(caught.value)
    assert "/project/" not in str(caught.value)


def test_deep_schemas_are_refused_not_followed():
    schema: dict = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match="nested deeper than 64"):
        check_schema(schema)


@pytest.mark.parametrize("pattern", ["^a$", "a|b", "^a$|^b$", "[$^]", r"\^a\$", "(a|b)+", ""])
def test_expressions_that_are_enforced(pattern):
    check_regex(pattern)


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(^a)", "(a$|b)"])
def test_anchors_inside_an_expression_are_refused(pattern):
    with pytest.raises(InputError, match="cannot be enforced there"):
        check_regex(pattern)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "a(b"), "Regex parsing error"),
        (Grammar("regex", r"(a)\1"), "Backreference"),
        (Grammar("regex", r"(?=a)a"), "Lookahead"),
        (Grammar("regex", r"[^\s\S]"), "allows no answer: nothing can be its first token"),
        (Grammar("ebnf", 'root ::= "a" b'), 'Rule "b" is not defined'),
        (Grammar("ebnf", "root ::= root"), "allows no answer"),
        (Grammar("structural_tag", "{}"), "the grammar (structural_tag) cannot be used"),
        (
            Grammar(
                "structural_tag",
                json.dumps(
                    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": INT}}}
                ),
            ),
            "'not' cannot be enforced",
        ),
    ],
)
def test_malformed_grammars_are_refused_at_the_door(grammar, message, compiler):
    with pytest.raises(InputError) as caught:
        compiler(grammar)
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYWORDS = sorted(
    {*json_schema._NOTES, *json_schema._ALONE, *set().union(*json_schema._OF_TYPE.values()), "type"}
)
SCHEMAS = st.recursive(
    st.dictionaries(
        st.sampled_from(KEYWORDS),
        JSON | st.sampled_from(["object", "string", "integer", "array"]),
        max_size=4,
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS),
        inner | st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_size=3,
    ),
)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS)
def test_whatever_comes_is_taken_or_refused(compiler, schema):
    """Nothing but an `InputError` comes out, however wrong the schema."""
    with contextlib.suppress(InputError):
        compiler(Grammar("json_schema", json.dumps(schema)))
