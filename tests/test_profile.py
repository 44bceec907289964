"""Profiles: what they hold and where they apply; how the search scores heads, layers and shares."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.api import LLM
from foretell.attention import Queries
from foretell.cache import KVArena, Lease
from foretell.drafters import DrafterContext, build_drafter
from foretell.drafters.sparse_target import SparseTargetDrafter
from foretell.errors import InputError
from foretell.kernels import HeadSpec
from foretell.profiling.blocks import BLOCK, Block, Looker, block, drafted, places
from foretell.profiling.heads import needle_scores, top_heads, weights
from foretell.profiling.passes import Passed, decode, draft, follow
from foretell.profiling.search import recovery, references, search
from foretell.profiling.traces import needles, prompts
from foretell.sparse import (
    POLICIES,
    Heads,
    KVReader,
    ModelShape,
    Profile,
    choose,
    read_profile,
    shape_of,
)
from foretell.sparse.policies import Dustin
from foretell.sparse.profile import shipped
from foretell.types import SamplingParams
from tests import gguf_files, oracle, zoo
from tests.test_sparse_decoding import GREEDY, LONG, SEEDED

TINY = ModelShape("tiny", 3, 4, 32)
FOUND = {
    "command": "foretell profile",
    "date": "2026-11-30",
    "machine": "none",
    "length": 64,
    "traces": 2,
    "arr": {},
    "curves": {},
}
PROFILE = Profile(TINY, TINY, Heads(2, (1,)), (Heads(0, (0, 3)), Heads(1, None)), {16: 0.3, 64: 0.8}, FOUND)


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama")


# --- the file


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"extra": 1}, "has unknown extra"),
        ({"found": None}, "found must be an object"),
        (
            {"target_heads": {"layer": 3, "heads": [0]}},
            "target_heads.layer must be .* between 0 and 2, got 3",
        ),
        ({"target_heads": {"layer": 1, "heads": [0, 4]}}, "target_heads.heads must be .* 0 and 3, got 4"),
        ({"target_heads": {"layer": 1, "heads": [2, 2]}}, "must be a list of different heads"),
        ({"target_heads": {"layer": True, "heads": None}}, "target_heads.layer must be"),
        ({"draft_heads": []}, "draft_heads must be a list of layers"),
        ({"draft_heads": [{"layer": 0}]}, r"draft_heads\[0\] lacks heads"),
        ({"draft_heads": [{"layer": 0, "heads": None}] * 2}, "draft_heads must name each layer once"),
        ({"lookahead": {}}, "lookahead must be an object"),
        ({"lookahead": {"64": 1.5}}, r"lookahead\[64\] must be between 0 and 1, got 1.5"),
        ({"lookahead": {"many": 0.5}}, "a budget must be a whole number above 0, got 'many'"),
        ({"target": {"name": "", "layers": 3, "heads": 4, "hidden": 32}}, "target.name must be text"),
        (
            {"draft": {"name": "x", "layers": 0, "heads": 4, "hidden": 32}},
            "draft.layers must be .* at least 1",
        ),
    ],
)
def test_a_profile_is_read_strictly(change, message, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE.to_json(), **change}))
    with pytest.raises(InputError, match=message) as error:
        read_profile(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize("name", PROFILE.to_json())
def test_every_field_must_be_there(name, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({k: v for k, v in PROFILE.to_json().items() if k != name}))
    with pytest.raises(InputError, match=f"lacks {name}"):
        read_profile(path)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(InputError, match="cannot read the profile"):
        read_profile(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        read_profile(tmp_path / "text.json")


@given(st.integers(4, 100_000))
def test_the_share_is_that_of_the_nearest_budget(budget):
    nearest = min((16, 64), key=lambda known: max(known / budget, budget / known))
    assert PROFILE.share(budget) == {16: 0.3, 64: 0.8}[nearest]


# --- which models it belongs to


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("tiny", True),
        ("/models/Tiny", True),
        ("someone/tiny-instruct", True),
        ("tiny.gguf", True),
        ("tiny2", False),
        ("untiny", False),
        ("", False),
    ],
)
def test_names(name, same):
    assert TINY.called(name) == same


def test_a_profile_of_other_models_is_refused(caplog):
    wide = replace(TINY, hidden=64)
    for pair in ((wide, TINY), (TINY, wide), (wide, None)):
        with pytest.raises(InputError, match=r"kv_profile is of .* tiny .*width 32.*, the .* width 64"):
            choose(PROFILE, *pair)
    assert choose(PROFILE, TINY, None) is PROFILE
    assert not caplog.text
    assert choose(PROFILE, TINY, replace(TINY, name="other")) is PROFILE
    assert "was found with draft tiny, used with other" in caplog.text


def test_shipped_profiles_are_chosen_by_shape_and_name(caplog, monkeypatch):
    other = replace(PROFILE, draft=ModelShape("small", 1, 2, 8))
    monkeypatch.setattr("foretell.sparse.profile.shipped", lambda: iter([other, PROFILE]))
    with caplog.at_level(logging.INFO):
        assert choose(None, replace(TINY, name="hub/Tiny-Chat"), TINY) is PROFILE
    assert "profile of tiny with draft tiny" in caplog.text
    assert choose(None, TINY, other.draft) is other
    assert choose(None, TINY, None) is other, "nobody looks ahead: the target's part alone counts"
    assert choose(None, replace(TINY, name="huge"), TINY) is None
    assert choose(None, replace(TINY, layers=4), TINY) is None


def test_shipped_profiles_are_sound():
    found = list(shipped())
    assert {p.target.name for p in found} >= {"smollm2-135m", "qwen2.5-coder-1.5b"}
    for profile in found:
        assert profile.target_heads.heads is not None
        assert 1 <= len(profile.draft_heads) <= 4
        for row in profile.found["arr"].values():
            assert row["random"] < row["profile"] <= row["oracle"]


# --- what it changes


def _reader(kv: str, profile: Profile | None, budget: int = 12) -> KVReader:
    return KVReader(POLICIES[kv], budget, 3, profile)


def test_the_reader_asks_whom_the_profile_names():
    for kv in ("dustin", "dustin-draft", "dustin-history"):
        reader = _reader(kv, PROFILE)
        assert reader.needs.queries == (2,)
        assert reader.draft_heads == PROFILE.draft_heads
    assert _reader("dustin", PROFILE).policy.lookahead == 0.3
    assert _reader("dustin", PROFILE, 60).policy.lookahead == 0.8
    assert _reader("dustin-draft", PROFILE).policy.lookahead == 1.0, "an ablation stays one"
    for kv in ("snapkv", "h2o", "quest"):
        assert _reader(kv, PROFILE).needs.queries == (1,), "published baselines keep their rule"


def test_the_history_is_that_of_the_named_heads(target):
    """transformers' own attention of the last token, the named heads' mean."""
    reader, tokens = _reader("dustin-history", PROFILE), LONG[2]
    passed = decode(target, tokens, 0, reader)
    history = reader._history(reader._histories[0], passed.arena, passed.lease)
    with torch.inference_mode():
        found = zoo.build("llama")(torch.tensor([tokens]), output_attentions=True)
    torch.testing.assert_close(history, found.attentions[2][0, 1, -1], atol=1e-5, rtol=1e-3)


def _texts(target, drafter, profile, params, kv="dustin") -> list[list[int]]:
    """One text per prompt, the same alone, batched, and after prefixes."""
    engine = oracle.engine(target, drafter, kv=kv, kv_budget=12, prefill_chunk=32, profile=profile)
    alone = [oracle.run(engine, [p], params)[0].output_ids for p in LONG]
    assert [r.output_ids for r in oracle.run(engine, LONG, params)] == alone
    assert [r.output_ids for r in oracle.run(engine, LONG[::-1], params)][::-1] == alone
    return alone


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_texts_depend_on_heads_and_on_no_neighbour(params, target):
    """With another head of the target, or other heads of the draft, another text."""
    draft = oracle.draft_model(target, target)
    plain = _texts(target, draft, None, params)
    profiled = _texts(target, draft, PROFILE, params)
    other = replace(PROFILE, target_heads=Heads(2, (3,)))
    assert profiled != plain
    assert _texts(target, draft, other, params) != profiled
    alone = replace(PROFILE, draft_heads=(Heads(2, (2,)),))
    ahead = [_texts(target, draft, p, params, "dustin-draft") for p in (PROFILE, alone)]
    assert ahead[0] != ahead[1]


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["default", "profile"])
def test_a_profile_keeps_the_hierarchy_lossless(profile, target):
    for drafter in ("none", oracle.draft_model(target, target)):
        engine = oracle.engine(
            target, drafter, kv="dustin", kv_budget=12, lossless=True, draft_tokens=7, profile=profile
        )
        for request, prompt in zip(oracle.run(engine, LONG, SEEDED), LONG, strict=True):
            assert request.output_ids == oracle.generate(target, prompt, SEEDED, frozenset())
            assert request.lossless


def test_drafters_are_asked_for_the_named_heads(target):
    draft = oracle.draft_model(target, target)
    assert draft.watch(PROFILE.draft_heads)
    assert draft._watched == PROFILE.draft_heads
    alone = SparseTargetDrafter(target, _reader("dustin", PROFILE))
    assert alone._watched == PROFILE.draft_heads
    assert alone.looker == shape_of(target, "")
    context = DrafterContext(target, None, 512, name="tiny", kv_profile=PROFILE)
    own = build_drafter("self", {"kv": "dustin", "budget": 12}, context)
    assert own.needs.queries == (2,)
    combined = build_drafter("suffix+self", {"kv": "dustin", "budget": 12}, context)
    assert combined.looker == own.looker == TINY


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "tiny.gguf"
    gguf_files.write(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        return LLM(path, drafter="none").loaded


def test_the_library_takes_a_profile(tiny, tmp_path, caplog):
    own = shape_of(tiny.model, tiny.name)
    heads = Heads(1, (0,))
    fits = Profile(own, own, heads, (heads,), {16: 1.0}, FOUND)
    path, ids = tmp_path / "fits.json", [i % 40 + 3 for i in range(30)]
    fits.write(path)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    llm = LLM(tiny, drafter="self", drafter_options={"budget": 4}, kv="dustin", kv_budget=8, kv_profile=path)
    assert llm.engine._reader.policy == Dustin(1.0)
    assert llm.engine._drafter._watched == (heads,)
    assert not llm.generate(ids, params)[0].lossless
    below = LLM(tiny, drafter="none", kv="dustin", kv_budget=8, lossless=True, kv_profile=fits)
    assert below.generate(ids, params)[0].lossless
    assert not caplog.text
    PROFILE.write(tmp_path / "other.json")
    with pytest.raises(InputError, match="kv_profile is of target tiny"):
        LLM(tiny, drafter="none", kv="dustin", kv_profile=tmp_path / "other.json")
    for kv in ("full", "quest"):
        LLM(tiny, drafter="none", kv=kv, kv_profile=path)
        assert f"kv_profile has no effect: kv is {kv}" in caplog.text
        caplog.clear()
    LLM(tiny, drafter="self", drafter_options={"kv": "dustin"}, kv_profile=path)
    assert "has no effect" not in caplog.text


# --- how it is found


def _passed(tokens: list[int], prompt: int, mass_RHN: torch.Tensor) -> Passed:
    """A trace of one layer whose rows from the prompt's last token on attend as given: keys are one-hot."""
    _, heads, length = mass_RHN.shape
    arena = KVArena(1, 1, length, length, torch.float32, torch.device("cpu"))
    arena.keys_LKSD[0, 0] = torch.eye(length)
    spec = HeadSpec(heads, 1, length, 1.0)
    queries = {0: Queries(mass_RHN.clamp(min=1e-9).log(), spec)}
    return Passed(tokens, prompt, queries, arena, Lease(0, length, tokens, length))


def test_retrieval_heads_by_hand():
    """Needle at places 1 and 2; the answer says one of its tokens, then another word. Head 1 looks at the
    needle when it is said, head 0 when it is not."""
    tokens, prompt = [5, 7, 8, 6, 7, 9], 4
    mass_RHN = torch.zeros(3, 3, 6)
    mass_RHN[0, 0, 0], mass_RHN[0, 1, 1], mass_RHN[0, 1, 2], mass_RHN[0, 1, 3] = 1, 0.2, 0.5, 0.3
    mass_RHN[0, 2, 2], mass_RHN[0, 2, 0] = 0.4, 0.6
    mass_RHN[1, :, 1] = 1
    scores = needle_scores(_passed(tokens, prompt, mass_RHN), range(1, 3))
    torch.testing.assert_close(scores, torch.tensor([[0.0, 0.7, 0.4]]), atol=1e-5, rtol=0)
    assert top_heads(scores, 2) == (Heads(0, (1, 2)),)
    many = weights(torch.arange(80.0).view(8, 10))
    assert int((many > 0).sum()) == 30
    assert float(many[7, 9]) == pytest.approx(79 / sum(range(50, 80)))
    assert top_heads(scores, 9) == (Heads(0, (0, 1, 2)),)
    assert needle_scores(_passed([5, 7, 8, 6, 3, 9], prompt, mass_RHN), range(1, 3)) is None


def test_a_block_is_what_transformers_attention_says(target):
    """ARR's vector, the layers' histories and the draft's look-ahead, against transformers."""
    passed = decode(target, LONG[2], BLOCK + 2)
    (place,) = places(passed)
    assert place == range(23, 28)
    heads = tuple(Heads(layer, (layer, 3)) for layer in range(3))
    other = follow(target, passed.tokens)
    looker = Looker(draft(target, other, drafted(place)), other)
    weight_LH = weights(torch.arange(12.0).view(3, 4))
    one = block(passed, place, heads, weight_LH, looker, heads)
    with torch.inference_mode():
        found = zoo.build("llama")(torch.tensor([passed.tokens]), output_attentions=True).attentions
    every = torch.stack([layer[0] for layer in found])
    wanted = (every[:, :, 23:28].mean(2) * weight_LH[..., None]).sum((0, 1))
    close = {"atol": 1e-5, "rtol": 1e-3}
    torch.testing.assert_close(one.true_N, wanted[:23], **close)
    assert one.own == pytest.approx(float(wanted[23:28].sum()), abs=1e-5)
    assert float(one.true_N.sum()) + one.own == pytest.approx(1, abs=1e-5)
    history = torch.stack([every[n, [n, 3], 22, :23].mean(0) for n in range(3)])
    torch.testing.assert_close(one.history_LN, history, **close)
    torch.testing.assert_close(one.default_N, every[1, :, 22, :23].mean(0), **close)
    ahead = every[:, :, 23:27, :23]
    ahead = ahead / ahead.sum(-1, keepdim=True)
    wanted = torch.stack([ahead[n, [n, 3]].mean((0, 1)) for n in range(3)])
    torch.testing.assert_close(one.lookahead_LN, wanted, **close)
    torch.testing.assert_close(one.default_ahead_N, ahead.mean((0, 1, 2)), **close)


def test_drafting_leaves_the_trace_as_it_was(target, decoder):
    """Reading everything the target drafts its own tokens, with the same queries; reading few keys, or as
    another model, it looks elsewhere from the second layer on."""
    reader, places = KVReader(POLICIES["snapkv"], 8, 3), range(70, 74)
    passed = decode(target, LONG[0], 6, reader)
    before = passed.arena.keys_LKSD.clone(), passed.arena.values_LKSD.clone()
    whole, few = (draft(target, passed, places, given) for given in (None, reader))
    assert torch.equal(passed.arena.keys_LKSD, before[0])
    assert torch.equal(passed.arena.values_LKSD, before[1])
    assert passed.lease.length == len(passed.tokens)
    for layer in range(3):
        assert torch.equal(whole[layer].q_THD, passed.at(layer, places).q_THD)
    assert torch.equal(few[0].q_THD[0], whole[0].q_THD[0])
    assert not torch.allclose(few[2].q_THD[0], whole[2].q_THD[0], atol=1e-3)


def _hand_made(seed: int = 0, layers: int = 4, length: int = 60, count: int = 3) -> list[Block]:
    """Blocks in which target layer 2 and draft layers 1 and 3 know what is needed, each half of it."""
    torch.manual_seed(seed)
    made = []
    for _ in range(count):
        need = torch.rand(length).softmax(0) * 0.1
        spots = torch.randperm(length - 30)[:12] + 10
        need[spots] += 0.06
        noise = torch.rand(2, layers, length) * 0.01
        history, ahead = noise[0], noise[1]
        history[2, spots[:4]] += 1
        ahead[1, spots[4:8]] += 1
        ahead[3, spots[8:]] += 1
        made.append(Block(length, need, 0.05, history, ahead, noise[0, 0], noise[1, 0]))
    return made


def test_the_search_finds_who_knows():
    blocks, budget = _hand_made(), 20
    found = search(blocks, [budget], lambda: None)
    assert found.target_layer == 2
    assert set(found.draft_layers) == {1, 3}
    assert [layer for layer, _ in found.by_draft_layers][:2] in ([1, 3], [3, 1])
    assert found.lookahead[budget] in (0.6, 0.7), "8 of 12 needed places are known to the draft, 11 are read"
    assert len(found.by_draft_layers) == 3, "a third layer was refused"
    curve = found.by_share[budget]
    assert curve[found.lookahead[budget]] == max(curve.values())
    arr = references(blocks, [budget], found)[budget]
    assert arr["random"] < arr["history only"] < arr["draft only"] < arr["profile"] <= arr["oracle"]
    assert arr["oracle"] == pytest.approx(
        sum(float(b.true_N[[*range(4), *range(55, 60)]].sum()) for b in blocks) / 3
        + sum(float(b.true_N[4:55].topk(11).values.sum()) for b in blocks) / 3
        + 0.05,
        abs=1e-5,
    )


@given(st.integers(0, 50), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([8, 20, 59]))
def test_recovery_is_the_mass_of_the_selection(seed, share, budget):
    """Between nothing and everything; a history that fits is recovered whole."""
    blocks = _hand_made(seed)
    signals = (lambda b: b.history_LN[0], lambda b: b.lookahead_LN[0])
    some = recovery(blocks, Dustin(share), budget, *signals)
    every = recovery(blocks, Dustin(share), 60, *signals)
    assert every == pytest.approx(sum(float(b.true_N.sum()) for b in blocks) / 3 + 0.05, abs=1e-5)
    assert 0.05 < some < every


def test_traces_are_what_they_are_said_to_be(tiny, tmp_path):
    tokenizer = tiny.tokenizer
    first, again = (needles(tokenizer, 400, 3, seed=1) for _ in range(2))
    assert first == again
    assert first != needles(tokenizer, 400, 3, seed=2)
    for needle in first:
        assert len(needle.tokens) == 400
        span = tokenizer.decode(needle.tokens[needle.span.start : needle.span.stop])
        assert needle.answer in span
        assert needle.answer not in tokenizer.decode(needle.tokens[needle.span.stop :])
    depths = [needle.span.start for needle in first]
    assert depths == sorted(depths)
    with pytest.raises(InputError, match="length must be at least"):
        needles(tokenizer, 200, 1, seed=1)
    own = prompts(tokenizer, 100, 3, None, 50)
    assert [len(p) for p in own] == [100] * 3
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "ab" * n}) for n in (10, 30, 200)))
    assert [len(p) for p in prompts(tokenizer, 100, 3, path, 50)] == [60, 100]
    with pytest.raises(InputError, match=r"no prompt in .* has 500 tokens"):
        prompts(tokenizer, 600, 3, path, 500)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.write(path, max_position_embeddings=512)
    return str(path)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path_factory.getbasetemp() / "profile-home"))


ARGS = ("--length", "330", "--traces", "3", "--blocks", "2", "--budget", "16", "--budget", "32")


def test_the_command_line_finds_a_profile(foretell, model, tmp_path, monkeypatch, caplog):
    """And goes on: the second run reads nothing, the profile is the same and can be used."""
    out = tmp_path / "own.json"
    args = ("profile", "--target", model, *ARGS, "--out", str(out))
    code, text, err = foretell(*args, "--json")
    assert code == 0, err
    value = json.loads(text)
    assert "answered no needle rightly" in caplog.text
    profile = read_profile(out)
    assert value["target_heads"] == profile.to_json()["target_heads"]
    assert len(profile.target_heads.heads) == 4
    assert set(profile.lookahead) == {16, 32}
    assert out.with_suffix(".png").stat().st_size > 1000
    monkeypatch.setattr("foretell.profiling.run.decode", None)
    code, text, _ = foretell(*args)
    assert code == 0
    assert "look-ahead's share" in text
    assert replace(read_profile(out), found={}) == replace(profile, found={})
    use = (
        "generate",
        "the " * 20,
        "-m",
        model,
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--drafter",
        "self",
    )
    code, _, err = foretell(*use, "--kv", "dustin", "--kv-budget", "8", "--kv-profile", str(out))
    assert code == 0
    assert "LOSSY" in err
    code, _, err = foretell(*args, "--seed", "9")
    assert code == 2
    assert "holds another search" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--length", "100000"), "length must be at most"),
        (("--budget", "500"), "budget must be below length"),
        (("--budget", "2"), "budget must be at least 4, got 2"),
        (("--traces", "0"), "traces must be at least 1"),
        (("--out", "x.txt"), "out must be a .json file"),
        (("--data", "nowhere.txt"), "nowhere.txt cannot be read"),
    ],
)
def test_bad_settings(more, message, foretell, model, tmp_path):
    out = () if "--out" in more else ("--out", str(tmp_path / "own.json"))
    code, _, err = foretell("profile", "--target", model, *ARGS, *out, *more)
    assert code == 2
    assert message in err
