"""Tools and response formats: pure parts first, then OpenAI's own client against a running server."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.api import LLM
from foretell.errors import InputError
from foretell.server.tools import CLOSE, OPEN, CallReader, Tool, choose, grammar_of, render
from tests import gguf_files
from tests.serving import serving

openai = pytest.importorskip("openai")
pytest.importorskip("xgrammar")

DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = Tool(
    "weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": DIGIT},
        "required": ["city"],
    },
)
CLOCK = Tool.of({"name": "clock"})


def call_text(name: str, arguments: object) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n{CLOSE}'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and (name, arguments) per call, of an answer that comes in pieces."""
    reader, text, calls = CallReader(), "", []
    for delta in [*(d for piece in pieces for d in reader.push(piece)), *reader.end()]:
        if delta.call is None:
            text += delta.text
            continue
        if delta.name is not None:
            assert delta.call == len(calls)
            calls.append([delta.name, ""])
        calls[delta.call][1] += delta.text
    assert reader.calls == len(calls)
    return text, [tuple(call) for call in calls]


ROME = {"city": "Rome"}
LOOK = "Let me look."
FULL = call_text("a", {"x": {}})
HEAD = FULL.index('{"x"')
ANSWERS = {
    'just text, with <tool and {"name": in it\n\n': ('just text, with <tool and {"name": in it\n\n', []),
    f"{LOOK}\n\n{call_text('weather', ROME)}": (LOOK, [("weather", '{"city": "Rome"}')]),
    f"{call_text('a', {})}\n{call_text('b', ROME)}": ("", [("a", "{}"), ("b", '{"city": "Rome"}')]),
    call_text("b", {"x": "}\n</tool_"}): ("", [("b", '{"x": "}\\n</tool_"}')]),
    f"{FULL}\nDone.\n": ("Done.\n", [("a", '{"x": {}}')]),
    call_text('q"uo\\te', {}): ("", [('q"uo\\te', "{}")]),
    # cut off
    FULL[: HEAD - 4]: (FULL[: HEAD - 4], []),
    FULL[:HEAD]: ("", [("a", "")]),
    FULL[: HEAD + 7]: ("", [("a", '{"x": {')]),
    FULL[: HEAD + 8]: ("", [("a", '{"x": {}')]),
    FULL[: HEAD + 9]: ("", [("a", '{"x": {}}')]),
    FULL[: HEAD + 10]: ("", [("a", '{"x": {}}')]),
    FULL[: HEAD + 15]: ("", [("a", '{"x": {}}')]),
    "": ("", []),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_taken_apart_however_it_comes(answer):
    wanted = ANSWERS[answer]
    assert read([answer]) == wanted
    assert read(list(answer)) == wanted

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, len(answer)), max_size=6))
    def cut(places):
        at = sorted({0, len(answer), *places})
        assert read([answer[a:b] for a, b in itertools.pairwise(at)]) == wanted

    cut()


def test_choices():
    both = [WEATHER, CLOCK]
    assert choose(both, "none") == ([], False)
    assert choose(both, "auto") == (both, False)
    assert choose(both, "required") == (both, True)
    assert choose(both, {"type": "function", "function": {"name": "clock"}}) == ([CLOCK], True)
    with pytest.raises(InputError, match="tool_choice names 'x', which is no tool") as caught:
        choose(both, {"type": "function", "function": {"name": "x"}})
    assert caught.value.hint == "one of: weather, clock"
    with pytest.raises(InputError, match="no tools were given"):
        choose([], "required")


def accepts(grammar, text: str) -> bool:
    import xgrammar

    info = xgrammar.TokenizerInfo([b"", b"</s>", *(bytes([i]) for i in range(256))], stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(grammar.source)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


@pytest.mark.parametrize(
    ("text", "auto", "single", "required", "named"),
    [
        ("Hello.", True, True, False, False),
        (call_text("weather", {"city": "Rome"}), True, True, True, True),
        ("Well. " + call_text("clock", {}), True, True, False, False),
        (call_text("clock", {}), True, True, True, False),
        (call_text("clock", {}) + "\n" + call_text("weather", {"city": "Oslo"}), True, False, True, False),
        (call_text("weather", {"city": "Paris"}), False, False, False, False),
        (call_text("clock", {"zone": 1}), False, False, False, False),
        (call_text("other", {}), False, False, False, False),
    ],
)
def test_grammars_of_calls(text, auto, single, required, named):
    both = [WEATHER, CLOCK]
    found = [
        accepts(grammar_of(both, must=False, several=True), text),
        accepts(grammar_of(both, must=False, several=False), text),
        accepts(grammar_of(both, must=True, several=True), text),
        accepts(grammar_of([WEATHER], must=True, several=False), text),
    ]
    assert found == [auto, single, required, named]


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]


class Template:
    """A tokenizer that shows what it was given."""

    def __init__(self, source: str) -> None:
        self.chat_template = source
        self.given: tuple = ()

    def render(self, messages, tools=None) -> str:
        self.given = (list(messages), tools)
        return "text"


def test_a_template_that_knows_calls_is_told_in_its_way():
    template = Template("{% if tools %}<tool_call>{% endif %}")
    render(template, TALK, [CLOCK])
    messages, tools = template.given
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert messages[2]["content"] == ""
    assert messages[3]["role"] == "tool"
    assert [tool["function"]["name"] for tool in tools] == ["clock"]
    render(template, TALK[:2], [])
    assert template.given[1] is None


def test_another_template_gets_text():
    template = Template("{{ messages }}")
    render(template, TALK, [CLOCK])
    messages, tools = template.given
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call these functions")
    assert '"name": "clock"' in messages[0]["content"]
    assert messages[2]["content"] == call_text("weather", {"city": "Rome"})
    assert messages[3]["content"] == "<tool_response>\nsunny\n</tool_response>"
    render(template, TALK[1:2], [])
    assert template.given[0] == [{"role": "user", "content": "Weather?"}]
    broken = SimpleNamespace(**{"chat_template": "", "render": template.render})
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{"}}
    with pytest.raises(InputError, match="a tool call's arguments must be JSON"):
        render(broken, [{"role": "assistant", "content": None, "tool_calls": [call]}], [])


# ---- a running server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tiny.gguf"

    def edit(fields):  # the helper takes "<" for a special token, as it begins like one
        fields["types"] = [3 if len(t) > 1 and t[0] == "<" else 1 for t in fields["tokens"]]

    gguf_files.write(path, max_position_embeddings=2048, edit=edit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        with serving(lambda: LLM(path, drafter="suffix", draft_tokens=4)) as running:
            yield running


TOOLS = [WEATHER.to_json(), CLOCK.to_json()]
ASK = [{"role": "user", "content": "Weather?"}]


def common(server, **options):
    return {
        "model": server.model,
        "messages": ASK,
        "max_tokens": 600,
        "temperature": 0.8,
        "seed": 3,
        **options,
    }


def test_a_required_call_comes_parsed(server):
    answer = server.client().chat.completions.create(
        **common(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.id.startswith("call-")
    assert call.function.name in ("weather", "clock")
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
    follow = [
        *ASK,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = server.client().chat.completions.create(**common(server, messages=follow, max_tokens=5))
    assert again.choices[0].finish_reason == "length"


def test_a_named_call_streams_the_same(server):
    named = {"type": "function", "function": {"name": "weather"}}
    options = common(server, tools=TOOLS, tool_choice=named)
    whole = server.client().chat.completions.create(**options).choices[0]
    name, arguments, reasons, ids = "", "", [], set()
    for chunk in server.client().chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            ids |= {call.id} - {None}
            name += call.function.name or ""
            arguments += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    (call,) = whole.message.tool_calls
    assert (name, arguments) == ("weather", call.function.arguments)
    assert len(ids) == 1
    assert reasons == ["tool_calls"]
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_a_call_that_is_cut_off_says_length(server):
    named = {"type": "function", "function": {"name": "weather"}}
    answer = server.client().chat.completions.create(
        **common(server, tools=TOOLS, tool_choice=named, max_tokens=60)
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_auto_answers_text_or_calls_and_none_only_text(server):
    auto = server.client().chat.completions.create(**common(server, tools=TOOLS, max_tokens=30))
    none = server.client().chat.completions.create(
        **common(server, tools=TOOLS, tool_choice="none", max_tokens=30)
    )
    plain = server.client().chat.completions.create(**common(server, max_tokens=30))
    assert auto.choices[0].message.content
    assert none.choices[0].message.content == plain.choices[0].message.content


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": DIGIT},
    "required": ["color", "size"],
    "additionalProperties": False,
}


def test_a_schema_is_followed_and_draft_or_not_the_text_is_the_same(server):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    options = common(server, response_format=form)
    texts = [
        server.client().chat.completions.create(**options, extra_body={"foretell": {"draft": draft}})
        .choices[0].message.content
        for draft in (True, True, False)
    ]  # fmt: skip
    assert len(set(texts)) == 1
    value = json.loads(texts[0])
    assert value["color"] in ("red", "blue")
    assert 1 <= value["size"] <= 9


def test_other_formats(server):
    def text(form):
        found = server.client().chat.completions.create(
            **common(server, extra_body={"response_format": form})
        )
        return found.choices[0].message.content

    assert len(text({"type": "regex", "regex": "[xy]{7}"})) == 7
    assert text({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}) in ("yes", "no")
    plain = server.client().chat.completions.create(**common(server)).choices[0].message.content
    assert text({"type": "text"}) == plain
    capped = server.client().chat.completions.create(
        **common(server, response_format={"type": "json_object"}, max_tokens=4)
    )
    assert capped.choices[0].message.content.startswith("{")


def schema_format(schema, name="a"):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


NO_TOOL = {"type": "function", "function": {"name": "x"}}
ODD = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "oneOf": []}}}
REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format", "response_format"),
    ({"response_format": schema_format({}, "a b")}, "name", None),
    ({"response_format": schema_format({"not": {}})}, "'not' cannot be enforced", "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, "(regex) cannot be used", "response_format"),
    ({"response_format": {"type": "regex", "regex": ""}}, "must be a regex, not empty", "response_format"),
    ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "cannot go with", "response_format"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens must be 0", "min_tokens"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions are called 'weather'", "tools"),
    ({"tool_choice": "required"}, "no tools were given", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NO_TOOL}, "is no tool", "tool_choice"),
    ({"parallel_tool_calls": False}, "no function may be called", "parallel_tool_calls"),
    ({"tools": [ODD]}, "'oneOf' cannot be enforced", "tools"),
    ({"messages": [{"role": "user"}]}, "content is missing", "messages.0.content"),
    ({"foretell": {"top": 3}}, "foretell.top needs foretell.tokens", "foretell"),
]


@pytest.mark.parametrize(("body", "message", "param"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_is_refused_names_its_field(body, message, param, server):
    options = {**common(server), "messages": body.get("messages", ASK)}
    rest = {key: value for key, value in body.items() if key != "messages"}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(**options, extra_body=rest)
    assert message in str(caught.value)
    assert param is None or caught.value.param == param


def test_tokens_of_an_answer_come_with_place_and_alternatives(server):
    body = {"foretell": {"tokens": True, "top": 2}}
    options = common(server, temperature=0.0, max_tokens=40)
    del options["seed"]
    for _ in range(2):  # the second time the drafter knows the answer
        chunks = list(server.client().chat.completions.create(**options, stream=True, extra_body=body))
    tokens = [t for chunk in chunks for t in (chunk.model_extra.get("foretell") or {}).get("tokens", ())]
    assert len(tokens) == 40
    assert {token["origin"] for token in tokens} == {"suffix", "target"}
    for before, token in zip([None, *tokens], tokens, strict=False):
        assert token["place"] == 1 or token["place"] == before["place"] + 1
        assert token["drafted"] == (token["origin"] == "suffix")
        assert len(token["top"]) == 2
        assert token["top"][0]["logprob"] == token["logprob"], "greedy is the likeliest"
    facts = chunks[-1].model_extra["foretell"]
    assert facts["stats"][0]["accepted"] == sum(token["drafted"] for token in tokens) > 0
    plain = {"foretell": {"tokens": True, "draft": False}}
    whole = server.client().chat.completions.create(**options, extra_body=plain)
    told = whole.choices[0].model_extra["foretell"]["tokens"]
    assert [t["id"] for t in told] == [t["id"] for t in tokens]
    assert not any(t["drafted"] or "top" in t for t in told)
