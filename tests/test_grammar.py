"""Answers that a grammar describes: every one is valid, and the same with and without drafts."""

from __future__ import annotations

import json
import re
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.engine import Engine
from foretell.errors import InputError
from foretell.grammar import GrammarCompiler
from foretell.models.tokenizer import Piece
from foretell.noise import Stream
from foretell.planner import FixedPlanner
from foretell.sampling import Sampler
from foretell.types import Grammar, SamplingParams
from foretell.verify import RULES
from tests import head_files, oracle

xgrammar = pytest.importorskip("xgrammar")

VOCAB = 96  # of the tiny models: three special tokens, then printable ASCII
END = 2
ENDS = frozenset([END])
PROMPTS = oracle.PROMPTS
WORDS = Grammar("regex", "(yes|yellow|no)( (maybe|may))?")
NUMBERS = Grammar("regex", "[0-9]{2,5}(,[0-9]{2}){0,2}")
NESTED = Grammar("ebnf", 'root ::= "(" root ")" | "x" | "y" root "z"')
OBJECT = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["ok", "n"],
        }
    ),
)
GRAMMARS = {"words": WORDS, "numbers": NUMBERS, "nested": NESTED, "object": OBJECT}
SETTINGS = {
    "greedy": SamplingParams(max_tokens=24),
    "seeded": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.95, seed=11),
    "penalised": SamplingParams(max_tokens=24, temperature=0.9, repetition_penalty=1.2, top_k=3, seed=4),
}


class Letters:
    """Stands in for a tokenizer: three special tokens, then characters, then some longer tokens."""

    SINGLE = ' "(),:[]{}' + string.digits + string.ascii_letters + "!#$%&'*+-./;<"
    LONGER = ("ye", "ma", "tru", '": ', "12", "((", "zz", '{"')

    def __init__(self) -> None:
        self.texts = [*self.SINGLE, *self.LONGER]
        self.ids = {text: 3 + i for i, text in enumerate(self.texts)}
        assert 3 + len(self.texts) == VOCAB

    def pieces(self):
        special = [None, Piece(b"<s>", True), Piece(b"</s>", True)]
        return [*special, *(Piece(text.encode(), False) for text in self.texts)]

    def decode(self, ids) -> str:
        return "".join(self.texts[i - 3] for i in ids if i >= 3)


LETTERS = Letters()


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(LETTERS, VOCAB, ENDS)


def engine_of(
    target, compiler, drafter="none", *, rule="coupled", options=None, draft_tokens=5, kv_slots=512
):
    base = oracle.engine(target, drafter, rule=rule, options=options)
    return Engine(
        target,
        base._drafter,
        RULES[rule],
        FixedPlanner(draft_tokens),
        decode=LETTERS.decode,
        constrain=compiler,
        kv_slots=kv_slots,
    )


def plain(target, compiler, prompt, params) -> list[int]:
    """The whole sequence through the model for every token, with a matcher of its own that starts anew at
    every token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        sampler = Sampler(
            params, tokens, len(prompt), params.seed or 0, ENDS, constraint=compiler(params.grammar)
        )
        tokens.append(sampler.choose(oracle.logits_after(target, tokens)))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


def is_valid(name: str, text: str) -> bool:
    if name in ("words", "numbers"):
        return re.fullmatch(GRAMMARS[name].source, text) is not None
    if name == "object":
        value = json.loads(text)
        return isinstance(value["ok"], bool) and 0 <= value["n"] <= 99 and set(value) == {"ok", "n"}
    while True:  # nested: take the outermost pair off
        if text == "x":
            return True
        if not text or (text[0], text[-1]) not in (("(", ")"), ("y", "z")):
            return False
        text = text[1:-1]


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


@pytest.fixture(scope="module")
def drafters(target, decoder, tmp_path_factory):
    """name -> a new drafter; a strange draft model, the target as its own draft, and heads among them."""
    root = tmp_path_factory.mktemp("grammar-heads")
    folders = {"eagle3": head_files.eagle3(root / "eagle3", "speculators")}
    folders["medusa"] = head_files.medusa(root / "medusa", "v1.0")
    other = decoder("llama", hidden_size=16, num_hidden_layers=1)

    def make(name):
        if name in folders:
            return f"{name}:{folders[name]}", {}
        if name == "strange draft":
            return oracle.draft_model(other, target, width=2), {}
        if name == "perfect draft":
            return oracle.draft_model(target, target, width=3), {}
        return name, {"min_n": 1, "branches": 3} if name == "ngram" else {}

    return make


DRAFTERS = [
    "none", "ngram", "suffix", "lookahead", "strange draft", "perfect draft", "eagle3", "medusa", "self",
]  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_plain_decodings_and_valid(name, setting, target, compiler, drafters):
    params = SETTINGS[setting].replace(grammar=GRAMMARS[name])
    wanted = [plain(target, compiler, prompt, params) for prompt in PROMPTS]
    assert any(answer[-1] == END for answer in wanted), "or nothing was tested"
    for answer in wanted:
        if answer[-1] == END:
            assert is_valid(name, LETTERS.decode(answer))
    for drafter in DRAFTERS:
        made, options = drafters(drafter)
        engine = engine_of(target, compiler, made, options=options)
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            (request,) = oracle.run(engine, [prompt], params, ENDS)
            assert request.output_ids == answer, f"{drafter}, alone"
            assert request.finish_reason == ("stop" if answer[-1] == END else "length")
        batch = oracle.run(engine, PROMPTS, params, ENDS)
        assert [r.output_ids for r in batch] == wanted, f"{drafter}, as a batch with prefix hits"


def test_a_perfect_draft_under_a_grammar_is_kept_whole(target, compiler):
    """The draft's masks are the target's: otherwise it would be refused wherever the grammar decides."""
    engine = engine_of(target, compiler, oracle.draft_model(target, target), draft_tokens=4)
    params = SamplingParams(max_tokens=24, grammar=OBJECT)
    oracle.run(engine, PROMPTS, params, ENDS)
    assert engine.stats.accepted == engine.stats.drafted > 20


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("drafter", ["ngram", "strange draft", "perfect draft", "eagle3"])
def test_other_rules_keep_to_the_grammar_too(rule, drafter, target, compiler, drafters):
    made, options = drafters(drafter)
    engine = engine_of(target, compiler, made, options=options, rule=rule)
    for name, grammar in GRAMMARS.items():
        params = SamplingParams(max_tokens=60, temperature=1.2, seed=5, grammar=grammar)
        for request in oracle.run(engine, PROMPTS, params, ENDS):
            if request.finish_reason == "stop":
                assert is_valid(name, request.text)
            assert all(allowed_prefix(compiler, grammar, request.output_ids))


def allowed_prefix(compiler, grammar, ids):
    matcher = compiler(grammar)
    return [matcher._follow(ids[: i + 1]) for i in range(len(ids))]


def test_neighbours_without_a_grammar_are_untouched(target, compiler):
    """Mixed in one batch; those without stay on the short way of the verification."""
    free = SamplingParams(max_tokens=16)
    wanted = [r.output_ids for r in oracle.run(engine_of(target, compiler), PROMPTS, free, ENDS)]
    engine = engine_of(target, compiler, "ngram", options={"min_n": 1})
    mixed = [free, free.replace(grammar=WORDS), free, free.replace(grammar=OBJECT)]
    requests = oracle.run(engine, PROMPTS, mixed, ENDS)
    assert [r.sampler.untouched for r in requests] == [True, False, True, False]
    for place in (0, 2):
        assert requests[place].output_ids == wanted[place]


def test_a_request_that_is_put_back_says_the_same(target, compiler, monkeypatch):
    """An arena in which four requests start and two can end: the others read their tokens again."""
    monkeypatch.setattr("foretell.engine.scheduler._AHEAD", 4)
    monkeypatch.setattr("foretell.engine.scheduler._PATIENCE", 6)
    params = SamplingParams(max_tokens=60, grammar=Grammar("regex", "([a-f]{2} ){18,}"))
    wanted = [plain(target, compiler, prompt, params) for prompt in PROMPTS]
    engine = engine_of(target, compiler, "suffix", kv_slots=160)
    requests = oracle.run(engine, PROMPTS, params, ENDS)
    assert engine.stats.preempted > 0
    assert [r.output_ids for r in requests] == wanted


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_grammar_that_runs_into_max_tokens_ends_with_length(limit, target, compiler):
    params = SamplingParams(max_tokens=limit, grammar=OBJECT)
    (request,) = oracle.run(engine_of(target, compiler), PROMPTS[:1], params, ENDS)
    assert (request.finish_reason, len(request.output_ids)) == ("length", limit)
    assert request.text.startswith("{")


def test_stop_strings_and_stop_ids_still_cut(target, compiler):
    full = SamplingParams(max_tokens=24, grammar=NUMBERS)
    engine = engine_of(target, compiler, "suffix")
    (whole,) = oracle.run(engine, PROMPTS[:1], full, ENDS)
    (cut,) = oracle.run(engine, PROMPTS[:1], full.replace(stop=whole.text[2:4]), ENDS)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(whole.text[2:4])], "stop")
    stop_id = whole.output_ids[2]
    (cut,) = oracle.run(engine, PROMPTS[:1], full.replace(stop=stop_id), ENDS)
    assert (cut.output_ids, cut.finish_reason) == (whole.output_ids[:3], "stop")


def test_allowed_tokens_are_exactly_those_that_lead_to_an_answer(compiler):
    """Every prefix of every string of a finite language, by brute force over all tokens."""
    language = [
        "yes",
        "yellow",
        "no",
        *(f"{a} {b}" for a in ("yes", "yellow", "no") for b in ("maybe", "may")),
    ]
    matcher, waiting, seen = compiler(WORDS), [[]], 0
    while waiting:
        answer = waiting.pop()
        text = LETTERS.decode(answer)
        scores = torch.zeros(VOCAB)
        matcher.restrict(scores, answer)
        may = {i for i, score in enumerate(scores.tolist()) if score == 0}
        wanted = {i for t, i in LETTERS.ids.items() if any(w.startswith(text + t) for w in language)}
        wanted |= {END} if text in language else set()
        assert may == wanted, text
        waiting += [[*answer, token] for token in may - {END}]
        seen += 1
    assert seen > 60, "several ways to write a word"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_matcher_that_jumps_about_masks_as_a_new_one(compiler, data):
    """Whatever was asked before: other branches, longer and shorter answers, refused ones, forks."""
    grammar = GRAMMARS[data.draw(st.sampled_from(sorted(GRAMMARS)))]
    matcher = compiler(grammar)
    answer: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        answer = answer[: data.draw(st.integers(0, len(answer)))]
        for _ in range(data.draw(st.integers(0, 4))):
            scores = torch.zeros(VOCAB)
            compiler(grammar).restrict(scores, answer)
            may = [i for i, score in enumerate(scores.tolist()) if score == 0]
            if data.draw(st.integers(0, 9)) == 0:
                answer.append(data.draw(st.integers(0, VOCAB - 1)))  # perhaps refused
            elif may:
                answer.append(data.draw(st.sampled_from(may)))
        mine, new = torch.randn(VOCAB), torch.zeros(0)
        new = mine.clone()
        matcher.restrict(mine, answer)
        compiler(grammar).restrict(new, answer)
        assert torch.equal(mine, new)
        if data.draw(st.booleans()):
            matcher = matcher.fork()


def test_a_fork_goes_its_own_way(compiler):
    params = SamplingParams(grammar=WORDS)
    yes = [LETTERS.ids[c] for c in "yes"]
    sampler = Sampler(params, [5, *yes], 1, 0, ENDS, constraint=compiler(WORDS))
    before = sampler.scores(torch.zeros(VOCAB))
    fork = sampler.fork([5])
    assert fork.choose(torch.zeros(VOCAB)) not in (END, yes[1])
    assert torch.equal(sampler.scores(torch.zeros(VOCAB)), before)
    assert before[END] == 0


def test_a_narrower_draft_row_and_a_row_with_nothing_left(compiler):
    """A draft's vocabulary may end before the tokens that the grammar wants."""
    for greedy in (True, False):
        params = SamplingParams(grammar=Grammar("regex", "zz"), temperature=0.0 if greedy else 1.0, seed=1)
        for stream in (Stream.TARGET, Stream.DRAFT):
            sampler = Sampler(
                params, [5], 1, 0, ENDS, constraint=compiler(params.grammar), draft_stream=stream
            )
            row = torch.randn(40)
            assert sampler.rank(row, [], 3) == []
            assert sampler.draw(row, [], 1) == ([], None)
            assert sampler.draw(row, [], 3) == ([], None)
            wide = torch.randn(VOCAB)
            assert len(sampler.rank(wide, [], 5)) == len(sampler.draw(wide, [], 5)[0]) == 2, "z and zz"


def test_padding_and_special_tokens_are_never_allowed():
    """Ids beyond the tokenizer's, ids without a token, and special tokens whose names the grammar takes."""
    wide = GrammarCompiler(LETTERS, VOCAB + 37, frozenset([END, 1000]))
    scores = torch.zeros(VOCAB + 37)
    wide(Grammar("regex", "[^x]*")).restrict(scores, [])
    assert scores[VOCAB:].max() == scores[0] == scores[1] == -torch.inf
    assert scores[END] == 0, "the empty answer is one"
    assert int((scores == 0).sum()) == sum("x" not in text for text in LETTERS.texts) + 1
    narrow = GrammarCompiler(LETTERS, 60, ENDS)
    scores = torch.zeros(60)
    narrow(Grammar("regex", "[^x]*")).restrict(scores, [])
    assert scores[3:].max() == 0


def test_where_no_token_can_go_on_the_answer_ends(compiler, caplog):
    """The vocabulary has no letter é."""
    matcher = compiler(Grammar("regex", "aé"))
    scores = torch.zeros(VOCAB)
    matcher.restrict(scores, [LETTERS.ids["a"]])
    assert [i for i, score in enumerate(scores.tolist()) if score == 0] == [END]
    assert "no token of the model can go on" in caplog.text


BAD = [
    (lambda: Grammar("xml", "a"), "grammar.kind must be one of json_object, json_schema, regex, ebnf,"),
    (lambda: Grammar("regex"), "grammar.source must be a regex, not empty"),
    (lambda: Grammar("regex", 5), "grammar.source must be text"),
    (lambda: Grammar("json_object", "{}"), "grammar.source must be empty for json_object"),
    (lambda: Grammar("json_schema", "{"), "grammar.source must be a json_schema, but is no JSON"),
    (lambda: Grammar("json_schema", "[1]"), "grammar.source must be a json_schema, which is an object"),
    (lambda: Grammar("regex", "a" * 300_000), "grammar.source must be at most 262144"),
    (lambda: SamplingParams(grammar="a+"), "grammar must be a Grammar"),
    (lambda: SamplingParams(grammar=WORDS, min_tokens=3), "min_tokens must be 0 with a grammar"),
    (lambda: SamplingParams(grammar=WORDS, ignore_eos=True), "ignore_eos must be false with a grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_values_are_refused_on_construction(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()
