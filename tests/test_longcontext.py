"""The quality suite for KV selection: answers are those of the library, texts are scored as a masked oracle
scores them, and an interrupted run goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from foretell.api import LLM
from foretell.attention import Segment, pack
from foretell.bench.longcontext.answer import Drafting, Runner, _score
from foretell.bench.longcontext.methods import CHOICES, Method, methods
from foretell.bench.longcontext.panel import block_attention, foreseen
from foretell.bench.longcontext.questions import Question
from foretell.bench.longcontext.run import Settings, passages, summarise
from foretell.cache import KVCache
from foretell.drafters.none import NoDrafter
from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.sparse import POLICIES, Signals, select
from foretell.types import SamplingParams, chain
from tests import gguf_files, zoo

IDS = [(i * i + 7 * i) % 90 + 3 for i in range(70)]
TEXT = [(i * i * 3 + 5 * i) % 90 + 3 for i in range(17)]
BUDGET = 12


class Letters:
    """A tokenizer without merges, for models of the zoo."""

    def decode(self, ids):
        return "".join(chr(0x100 + token) for token in ids)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "tiny.gguf"
    gguf_files.write(path, max_position_embeddings=1024)
    return path


@pytest.fixture(scope="module")
def tiny(path, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        return LLM(path, drafter="none").loaded


@pytest.fixture(scope="module")
def zoo_model(decoder):
    return LoadedModel("llama", None, decoder("llama"), Letters(), frozenset())


def question(**changes):
    given = {"id": "q", "task": "t", "length": 100, "ids": IDS, "references": ("x",), "max_tokens": 20}
    return Question(**given, metric="recall", **changes)


@pytest.mark.parametrize("drafter", ["none", "self", "draft"])
def test_every_policy_says_what_the_library_says(drafter, tiny, path, monkeypatch, tmp_path):
    """One prompt, read once, all policies in one batch: what `LLM(kv=policy)` answers alone."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    drafting = {
        "none": Drafting(tokens=0),
        "self": Drafting(tokens=3, budget=16),
        "draft": Drafting(str(path), tokens=3),
    }[drafter]
    own = {"none": "none", "self": "self", "draft": f"draft:{path}"}[drafter]
    options = {"budget": "16"} if drafter == "self" else {}
    runner = Runner(tiny, methods(list(POLICIES), [BUDGET]), drafting, 100, at_once=3)
    found = {outcome.method: outcome for outcome in runner.answers(question())}
    params = SamplingParams(max_tokens=20)
    for name in ("full", *POLICIES):
        kv = {} if name == "full" else {"kv": name, "kv_budget": BUDGET}
        llm = LLM(tiny, drafter=own, drafter_options=options, draft_tokens=drafting.tokens or None, **kv)
        (answer,) = llm.generate([IDS], params)
        outcome = found[name if name == "full" else f"{name}@{BUDGET}"]
        assert list(outcome.ids) == answer.token_ids, name
        behind = answer.stats.emitted - answer.stats.first_emitted
        assert outcome.read == answer.stats.kv_read / behind
        assert outcome.al == answer.stats.al
    assert len({outcome.ids for outcome in found.values()}) > 1, "somewhere the selection changed the text"


def test_the_oracle_and_looking_ahead_choose_by_other_signals(tiny):
    """All methods in one group; the oracle's first selection holds most of the true attention."""
    runner = Runner(tiny, methods(None, [BUDGET]), Drafting(tokens=3, budget=16), 100)
    shares = {o.method.partition("@")[0]: o.share for o in runner.perplexity(IDS, TEXT[:9])}
    assert set(shares) == {"full", *CHOICES}
    assert shares["full"] == 1
    best = shares.pop("oracle")
    assert all(0 < share <= best + 1e-6 for name, share in shares.items() if name != "full")
    assert shares["dustin"] != shares["dustin-history"]
    assert shares["dustin-draft"] != shares["dustin"]


def _foretold(count, start=()):
    """What the model says behind the prompt and `start`, greedy, by transformers."""
    tokens = [*IDS, *start]
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(zoo.build("llama")(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(IDS) + len(start) :]


class Foreteller(NoDrafter):
    """Drafts what the model would say if it read everything."""

    def propose(self, requests, plans):
        return [
            chain(_foretold(plan.draft_tokens, request.tokens[len(IDS) :]))
            for request, plan in zip(requests, plans, strict=True)
        ]


def _log_probability(text, budget, drafted):
    """Of the text behind the prompt but for its first token, by transformers under a mask, and the steps that
    it took. A step reads sinks, a window, and its own rows: the last token and what was drafted rightly."""
    tokens = [*IDS, *text]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
    start, steps = len(IDS), 0
    while start < len(tokens) - 1:
        draft = _foretold(drafted, tokens[len(IDS) : start + 1])
        rows = range(start, start + 1 + foreseen(draft, tokens[start + 1 : -1]))
        chosen = select(POLICIES["streaming"], Signals(start, len(IDS)), budget) if budget else range(start)
        for row in rows:
            mask[row] = -torch.inf
            mask[row, chosen] = 0
            mask[row, start : row + 1] = 0
        start, steps = rows.stop, steps + 1
    with torch.inference_mode():
        model = zoo.build("llama")
        logits = model(input_ids=torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
    wanted = torch.tensor(tokens[len(IDS) + 1 :])[:, None]
    return float(logits[len(IDS) : -1].log_softmax(-1).gather(1, wanted).sum()), steps


def test_of_a_draft_counts_what_the_text_confirms():
    assert foreseen([5, 6, 7], [5, 6, 8, 7]) == 2
    assert foreseen([5, 6], [5, 6, 7]) == foreseen([5, 6, 7], [5, 6]) == 2
    assert foreseen([], [5]) == foreseen([4], [5]) == foreseen([4], []) == 0


@pytest.mark.parametrize("drafted", [0, 3])
def test_texts_are_scored_as_a_masked_oracle_scores_them(drafted, zoo_model):
    """A text that the model would say in part: four tokens a step, one behind each surprise."""
    beginning = [*_foretold(7), 40]
    text = [*beginning, *_foretold(8, beginning), 50]
    runner = Runner(zoo_model, methods(["streaming"], [24]), Drafting(tokens=drafted), 100)
    runner._draft = Foreteller() if drafted else None
    full, streaming = runner.perplexity(IDS, text)
    wanted, _ = _log_probability(text, None, drafted)
    assert full.value == pytest.approx(wanted, abs=1e-3)
    wanted, steps = _log_probability(text, 24, drafted)
    assert streaming.value == pytest.approx(wanted, abs=1e-3)
    assert full.value != pytest.approx(streaming.value, abs=1e-2)
    assert streaming.tokens == 16
    assert streaming.read == 24 * steps / 16
    assert steps == (5 if drafted else 16)


def test_a_whole_context_can_be_scored(tiny):
    """Prompt, text and room for a token behind it fill the model's context to the last position."""
    context = tiny.model.max_context
    settings = Settings((context,), 1, 1, 7, ("perplexity",))
    (passage, *_) = passages(settings, tiny.tokenizer)
    found = Runner(tiny, methods(["streaming"], [64]), Drafting(tokens=2), context).perplexity(
        passage.ids, passage.text
    )
    assert [outcome.tokens for outcome in found] == [7, 7]
    assert len(passage.ids) + 7 + 2 == context


def _selections(runner, text):
    """What every step of a scored text read."""
    kept, original = [], runner._build

    def build(text):
        panel, engine = original(text)
        reader = engine._reader
        measure = reader._measure
        reader._measure = lambda *args: (kept.append(args[3].tolist()), measure(*args))
        return panel, engine

    runner._build = build
    outcomes = runner.perplexity(IDS, text)
    runner._build = original
    return kept, outcomes


def test_looking_ahead_does_not_know_the_text(zoo_model):
    """The first step reads the same whether the text confirms its draft or not."""
    runner = Runner(zoo_model, methods(["dustin", "quest"], [BUDGET]), Drafting(tokens=3, budget=60), 100)
    expected = _foretold(9)
    other = [expected[0], *(token % 90 + 4 for token in expected[1:])]
    (foreseen_, longer), (surprised, shorter) = _selections(runner, expected), _selections(runner, other)
    assert foreseen_[:2] == surprised[:2]
    assert foreseen_[0] != foreseen_[1]
    assert longer[1].al > shorter[1].al


def test_block_attention_is_that_of_transformers(decoder):
    """Mean over rows, layers and heads, of the history's share alone."""
    model = decoder("llama")
    cache = KVCache(model.new_arena(128))
    tokens = [*IDS, 9]
    lease = cache.reserve(tokens, 100)
    model.forward(pack([Segment(lease.start, 0, IDS)], cache.arena))
    cache.commit(lease, range(len(IDS)))
    found_N = block_attention(model, cache.arena, lease, chain([11, 12]), (0, 1, 2))
    with torch.inference_mode():
        out = zoo.build("llama")(torch.tensor([[*tokens, 11, 12]]), output_attentions=True)
    masses = torch.stack([layer[0] for layer in out.attentions])[:, :, len(IDS) :, : len(IDS)]
    wanted_N = (masses / masses.sum(-1, keepdim=True)).mean((0, 1, 2))
    torch.testing.assert_close(found_N, wanted_N, atol=1e-5, rtol=1e-3)
    assert lease.length == len(IDS), "nothing is committed"


def test_methods():
    assert [m.name for m in methods(["quest", "oracle"], [64, 32])] == [
        "full",
        "quest@64",
        "oracle@64",
        "quest@32",
        "oracle@32",
    ]
    assert [m.policy for m in methods(None, [8]) if m.looks_ahead] == ["dustin", "dustin-draft"]
    with pytest.raises(InputError, match="unknown --policy 'quests'"):
        methods(["quests"], [64])
    with pytest.raises(InputError, match="--budget must be at least 4, got 3"):
        methods(None, [3])
    assert Method("oracle", 8).rule is not Method("dustin", 8).rule


def _outcome(method, value, tokens=1, share=None):
    return {"method": method, "value": value, "tokens": tokens, "read": 8.0, "share": share, "al": 1.0}


def test_summary_by_hand():
    cells = [
        {
            "task": "kv",
            "length": 512,
            "outcomes": [_outcome("full", 1), _outcome("quest@64", 0.5, share=0.4)],
        },
        {
            "task": "kv",
            "length": 512,
            "outcomes": [_outcome("full", 0.5), _outcome("quest@64", 0.5, share=0.8)],
        },
        {"task": "passkey", "length": 512, "outcomes": [_outcome("full", 0), _outcome("quest@64", 1)]},
        {
            "task": "perplexity",
            "length": 512,
            "outcomes": [_outcome("full", -2.0, 2), _outcome("quest@64", -3.0, 2)],
        },
    ]
    rows = {(row["task"], row["method"]): row for row in summarise(cells)}
    assert rows["kv", "full"]["score"] == 75
    assert rows["kv", "quest@64"]["kept"] == pytest.approx(50 / 75, abs=1e-4)
    assert rows["kv", "quest@64"]["arr"] == pytest.approx(0.6)
    assert rows["passkey", "quest@64"]["kept"] is None, "full KV scores nothing there"
    assert rows["all retrieval", "quest@64"]["score"] == pytest.approx(100 * 2 / 3, abs=1e-3)
    assert rows["perplexity", "quest@64"]["score"] == pytest.approx(math.exp(1.5), abs=1e-3)
    assert rows["perplexity", "quest@64"]["kept"] == pytest.approx(math.exp(-0.5), abs=1e-4)
    assert rows["perplexity", "quest@64"]["budget"] == 64


SHORT = ("--lengths", "600", "--depths", "2", "--budget", "64", "--text", "8", "--task", "needle")
SHORT += ("--task", "perplexity", "--policy", "streaming", "--policy", "dustin")


def test_the_command_runs_and_resumes(foretell, path, tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("The cat saw a dog. It ran away. " * 40)
    where = ("-m", str(path), "--books", str(tmp_path / "books"), "--out", str(tmp_path / "out"))
    code, out, err = foretell("bench", "longcontext", *where, *SHORT, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert {(row["task"], row["method"]) for row in rows} == {
        (task, method)
        for task in ("needle", "perplexity")
        for method in ("full", "streaming@64", "dustin@64")
    }
    written = {p.name for p in (tmp_path / "out").iterdir()}
    stem = "longcontext"
    assert written == {
        f"{stem}.json",
        f"{stem}.md",
        f"{stem}.png",
        f"{stem}-needle.png",
        f"{stem}.tiny.gguf.jsonl",
    }
    log = tmp_path / "out" / f"{stem}.tiny.gguf.jsonl"
    lines = log.read_text().splitlines()
    assert len(lines) == 1 + 3
    log.write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
    again = foretell("bench", "longcontext", *where, *SHORT, "--json")[1]
    assert [json.loads(line) for line in again.splitlines()] == rows
    assert lines[1] in log.read_text()
    code, _, err = foretell("bench", "longcontext", *where, *SHORT, "--seed", "1")
    assert code == 2
    assert "holds another measurement" in err
    code, out, _ = foretell("bench", "longcontext", *where, *SHORT)
    assert "streaming@64" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lengths", "2000"], "--lengths must be between 256 and the model's context of 1024, got 2000"),
        (["--lengths", "100"], "--lengths must be between 256"),
        (["--task", "needles"], "unknown --task 'needles'"),
        (["--policy", "full"], "unknown --policy 'full'"),
        (["--budget", "3"], "--budget must be at least 4, got 3"),
        (["--text", "0"], "--text"),
        (["--lengths", "300", "--text", "64"], "--text must leave 256 tokens of a length of 300, got 64"),
        (["--books", "/nowhere"], "--books: there is no folder /nowhere"),
        (["--longbench", "/nowhere"], "--longbench: there is no folder /nowhere"),
        (["--lengths", "512", "--task", "common-words"], "common-words does not fit"),
    ],
)
def test_bad_input_is_named(args, message, foretell, path, tmp_path):
    where = ("-m", str(path), "--out", str(tmp_path))
    given = ["--lengths", "1024"] if "--lengths" not in args else []
    code, _, err = foretell("bench", "longcontext", *where, *given, *args)
    assert code == 2
    assert message in err


def test_settings_without_effect_are_told(foretell, path, tmp_path):
    args = ["--draft", str(path), "--draft-tokens", "0", "--lengths", "100", "--out", str(tmp_path)]
    args += ["--task", "kv", "--depths", "3", "--text", "8", "--books", "x"]
    _, _, err = foretell("bench", "longcontext", "-m", str(path), *args)
    assert "--draft has no effect: --draft-tokens is 0" in err
    assert "dustin goes by the target's last token alone" in err
    for option in ("--depths", "--text", "--books"):
        assert f"{option} has no effect" in err


def test_a_draft_of_another_vocabulary_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    other = tmp_path / "other.gguf"
    gguf_files.write(other, edit=lambda fields: fields["tokens"].__setitem__(-1, "zz"))
    with pytest.raises(InputError, match=r"other\.gguf has another vocabulary than the target"):
        Runner(tiny, methods(["dustin"], [64]), Drafting(str(other)), 100)


def test_longbench_runs_beside_a_task(foretell, path, tmp_path):
    line = {"input": "Type:", "context": "Question: Who? Type: Person", "answers": ["Person"]}
    (tmp_path / "trec.jsonl").write_text(json.dumps({**line, "all_classes": ["Person", "Date"]}) + "\n")
    args = ("-m", str(path), "--longbench", str(tmp_path), "--task", "kv", "--lengths", "400")
    args += ("--policy", "quest", "--budget", "32", "--out", str(tmp_path / "out"), "--json")
    code, out, err = foretell("bench", "longcontext", *args)
    assert code == 0, err
    rows = {(row["task"], row["method"]): row for row in map(json.loads, out.splitlines())}
    assert rows["trec", "quest@32"]["prompts"] == 1
    assert "## lengths as in the data" in (tmp_path / "out" / "longcontext.md").read_text()


def test_only_the_first_line_counts_where_it_is_so():
    asked = {"references": ("Date",), "metric": "classification", "classes": ("Date", "City")}
    base = Question("q", "trec", 0, IDS, max_tokens=4, **asked)
    assert _score(base, "\nDate\nCity") == 0.5
    assert _score(replace(base, first_line=True), "\nDate\nCity") == 1.0
