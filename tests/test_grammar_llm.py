"""Grammars through the library and the command line, on a tiny byte-level model and on SmolLM2."""

from __future__ import annotations

import builtins
import json
import re

import pytest

from foretell.api import LLM
from foretell.errors import InputError
from foretell.types import Grammar, SamplingParams
from tests import gguf_files

pytestmark = pytest.mark.xdist_group("grammar")  # the fixtures are made once

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["en", "fr", "de"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "tiny.gguf"
    gguf_files.write(path)
    return path


@pytest.fixture(scope="module")
def tiny(path, tmp_path_factory):
    pytest.importorskip("xgrammar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        yield LLM(path, drafter="ngram", drafter_options={"min_n": 1}, draft_tokens=4)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_text_of_a_byte_level_model_follows(seed, tiny):
    """Whole characters too: bytes of a multi-byte character come one token each."""
    params = SamplingParams(max_tokens=60, temperature=0.0 if seed is None else 1.2, seed=seed)
    for pattern in ("(été|naïve){2,4}", "[a-c]{3}-[0-9]{2}", "[^a-z]{4,6}"):
        (answer,) = tiny.generate("the", params.replace(grammar=Grammar("regex", pattern)))
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] in tiny.loaded.end_ids


def test_several_answers_and_a_stream(tiny):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=3, grammar=Grammar("regex", "[ab]{5}"))
    texts = [answer.text for answer in tiny.generate("the", params)]
    assert all(re.fullmatch("[ab]{5}", text) for text in texts)
    assert len(set(texts)) > 1
    stream = tiny.stream("the", params.replace(n=1))
    assert "".join(chunk.text for chunk in stream) == texts[0]
    plain = LLM(tiny.loaded, drafter="none")
    assert [answer.text for answer in plain.generate("the", params)] == texts


def test_a_bad_grammar_refuses_the_call_before_anything_runs(tiny):
    good, bad = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, grammar=Grammar("regex", "a("))
    with pytest.raises(InputError, match=r"the grammar \(regex\) cannot be used"):
        tiny.generate(["one", "two"], [good, bad])
    assert tiny.engine.idle


def test_without_xgrammar_the_error_says_how_to_get_it(tiny, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "xgrammar":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the package xgrammar") as caught:
        tiny.generate("the", SamplingParams(max_tokens=9, grammar=Grammar("json_object")))
    assert caught.value.hint == "pip install 'foretell[grammar]'"
    assert tiny.generate("the", SamplingParams(max_tokens=2))[0].text is not None


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    import sys

    from foretell.cli.main import main

    monkeypatch.setattr(sys, "argv", ["foretell", *args])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_takes_grammars(tiny, path, tmp_path, monkeypatch, capsys):
    common = ["generate", "the", "-m", str(path), "--raw", "--max-tokens", "200"]
    code, out, _ = run(monkeypatch, capsys, *common, "--regex", "[0-9]{3}")
    assert (code, bool(re.fullmatch(r"\d{3}\n", out))) == (0, True)
    (tmp_path / "s.json").write_text(json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}))
    code, out, _ = run(monkeypatch, capsys, *common, "--json-schema", str(tmp_path / "s.json"))
    assert code == 0
    assert set(json.loads(out)) <= {1, 2}
    code, out, _ = run(monkeypatch, capsys, *common, "--json-object", "--max-tokens", "3")
    assert (code, out[0]) == (0, "{")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a", "--json-object"], "--json-object and --regex exclude each other"),
        (["--json-schema", "/nowhere.json"], "json_schema /nowhere.json cannot be read"),
        (["--regex", "a("], "the grammar (regex) cannot be used"),
        (["--regex", ""], "grammar.source must be a regex, not empty"),
        (["--regex", "a", "--min-tokens", "3"], "min_tokens must be 0 with a grammar"),
    ],
)
def test_generate_refuses_bad_grammars(options, message, tiny, path, monkeypatch, capsys):
    code, out, err = run(
        monkeypatch, capsys, "generate", "the", "-m", str(path), "--raw", "--max-tokens", "9", *options
    )
    assert (code, out) == (2, "")
    assert message in err


# ---- SmolLM2 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    pytest.importorskip("xgrammar")
    return LLM("smollm2-135m", drafter="none")


QUESTIONS = [
    [{"role": "user", "content": f"Describe {who} as JSON: name, age, and the languages that they speak."}]
    for who in ("a baker from Lyon", "an old sailor", "my neighbour Tim")
]


@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_schema_answers_of_a_real_model_parse_and_validate(temperature, smollm):
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=5, grammar=SCHEMA)
    wanted = smollm.generate(QUESTIONS, params)
    for answer in wanted:
        assert answer.finish_reason == "stop"
        value = json.loads(answer.text)
        assert list(value) == ["name", "age", "languages"]
        assert len(value["name"]) <= 30
        assert 0 <= value["age"] <= 130
        assert 1 <= len(value["languages"]) <= 3
        assert set(value["languages"]) <= {"en", "fr", "de"}
    for drafter in ("suffix", "draft:smollm2-135m"):
        llm = LLM(smollm.loaded, drafter=drafter, draft_tokens=5)
        for _ in range(2):  # the second time the suffix drafter knows the answers
            found = llm.generate(QUESTIONS, params)
            assert [a.token_ids for a in found] == [a.token_ids for a in wanted], drafter
        assert llm.engine.stats.accepted > 0


@pytest.mark.real
def test_masks_of_a_real_vocabulary_are_those_of_its_bytes(smollm):
    """49,152 tokens: allowed is what the expression's first characters allow, and no special token."""
    import torch

    matcher = smollm.engine.constrain(Grammar("regex", "(Paris|Parma|Oslo)"))
    scores = torch.zeros(smollm.loaded.model.vocab_size)
    matcher.restrict(scores, [])
    pieces = smollm.tokenizer.pieces()
    wanted = {
        i
        for i, piece in enumerate(pieces)
        if piece is not None
        and not piece.special
        and any(word.startswith(piece.data.decode(errors="replace")) for word in ("Paris", "Parma", "Oslo"))
    }
    assert {i for i, score in enumerate(scores.tolist()) if score == 0} == wanted
    assert len(wanted) > 5
