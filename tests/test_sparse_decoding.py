"""Decoding that reads a selection: equal to full decoding where all fits, to a masked oracle where not, and
never mistaken for lossless."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from foretell.api import LLM
from foretell.drafters import DrafterContext, build_drafter
from foretell.errors import InputError
from foretell.sparse import KV_CHOICES, POLICIES, Signals, select
from foretell.types import SamplingParams
from tests import gguf_files, oracle, zoo
from tests.test_cli import gguf_model  # noqa: F401

LOSSY = [name for name in KV_CHOICES if name != "full"]
LONG = [
    [(i * i + 7 * i + shift) % 90 + 3 for i in range(count)] for shift, count in ((3, 70), (5, 41), (8, 23))
]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama")


@pytest.fixture
def other(decoder):
    return decoder("llama", hidden_size=16, num_hidden_layers=1)


@pytest.mark.parametrize("kv", LOSSY)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_budget_that_holds_everything_changes_no_bit(kv, params, target, other):
    params = params.replace(logprobs=2)
    full = oracle.run(oracle.engine(target, oracle.draft_model(other, target)), LONG, params)
    fits = oracle.engine(target, oracle.draft_model(other, target), kv=kv, kv_budget=94)
    requests = oracle.run(fits, LONG, params)
    assert [r.output_ids for r in requests] == [r.output_ids for r in full]
    assert [r.logprobs for r in requests] == [r.logprobs for r in full]
    assert all(r.lossless for r in requests), "nothing was left out"


def _streaming_by_mask(name: str, prompt: list[int], count: int, budget: int) -> list[int]:
    """Greedy decoding by transformers, everything computed again for every token, under a mask in which each
    generated token reads sinks and a window of what is before it."""
    model, tokens = zoo.build(name), list(prompt)
    for _ in range(count):
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        for row in range(len(prompt), len(tokens)):
            mask[row] = -torch.inf
            mask[row, select(POLICIES["streaming"], Signals(row, len(prompt)), budget)] = 0
            mask[row, row] = 0
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([tokens]), attention_mask=mask[None, None])
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_streaming_equals_a_masked_oracle(name, decoder):
    """Also batched with others of other lengths, one of which fits its budget at first."""
    engine = oracle.engine(decoder(name), kv="streaming", kv_budget=24, prefill_chunk=16)
    requests = oracle.run(engine, LONG, GREEDY)
    for request, prompt in zip(requests, LONG, strict=True):
        assert request.output_ids == _streaming_by_mask(name, prompt, GREEDY.max_tokens, 24)
    assert [r.stats.kv_read for r in requests] == [23 * 24, 23 * 24, 23 + 22 * 24]
    full = oracle.run(oracle.engine(decoder(name)), LONG, GREEDY)
    assert [r.stats.kv_read for r in full] == [sum(range(n, n + 23)) for n in map(len, LONG)]


@pytest.mark.parametrize("kv", LOSSY)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_lossy_answers_depend_on_no_neighbour_and_are_marked(kv, params, target, other):
    """Alone, as a batch, and again after prefixes were left behind; the verdict is lossy, and somewhere the
    text is really another one."""
    full = oracle.run(oracle.engine(target), LONG, params)
    engine = oracle.engine(target, oracle.draft_model(other, target), kv=kv, kv_budget=12, prefill_chunk=32)
    alone = [oracle.run(engine, [p], params)[0] for p in LONG]
    batch = oracle.run(engine, LONG, params)
    again = oracle.run(engine, LONG[::-1], params)[::-1]
    for requests in (alone, batch, again):
        assert not any(r.lossless for r in requests)
        assert [r.output_ids for r in requests] == [r.output_ids for r in alone]
    assert [r.output_ids for r in alone] != [r.output_ids for r in full]


def test_inexact_keys_are_no_prefix(target):
    """A conversation that goes on: what the last answer left behind is exact only up to its prompt."""
    engine = oracle.engine(target, kv="streaming", kv_budget=12)
    (first,) = oracle.run(engine, [LONG[1]], GREEDY)
    onward = [*LONG[1], *first.output_ids, 5, 6]
    (second,) = oracle.run(engine, [onward], GREEDY)
    fresh = oracle.engine(target, kv="streaming", kv_budget=12)
    assert second.output_ids == oracle.run(fresh, [onward], GREEDY)[0].output_ids
    assert second.stats.reused == len(LONG[1])


def test_policies_that_need_the_whole_prompt_reuse_no_prefix(target):
    for kv in LOSSY:
        engine = oracle.engine(target, kv=kv, kv_budget=12)
        oracle.run(engine, [LONG[0]], GREEDY)
        (again,) = oracle.run(engine, [LONG[0]], GREEDY)
        assert (again.stats.reused == 0) == (kv in ("snapkv", "h2o"))


def test_the_draft_model_tells_where_it_looks(target, model_folder, decoder):
    """Mean over its queries, layers and heads of transformers' attention, over the target's history only."""
    draft = decoder("llama", num_hidden_layers=4)
    drafter = oracle.draft_model(draft, target)
    assert drafter.watch()
    engine = oracle.engine(target, drafter, draft_tokens=3)
    request = engine.submit(LONG[2], GREEDY, frozenset())
    for _ in range(3):
        engine.step()
    trees = drafter.propose([request], engine.planner.plan([request]))
    length = request.lease.length
    assert length == len(request.tokens) - 1
    tokens = [*request.tokens, *trees[0].tokens[:-1]]
    with torch.inference_mode():
        found = zoo.build("llama", num_hidden_layers=4)(torch.tensor([tokens]), output_attentions=True)
    masses = torch.stack([found.attentions[layer][0] for layer in (1, 2, 3)])[:, :, length:, :length]
    wanted = (masses / masses.sum(-1, keepdim=True)).mean((0, 1, 2))
    torch.testing.assert_close(drafter.draft_attention(request, length), wanted, atol=1e-5, rtol=1e-3)
    engine.abort(request)


def _whole_attention(name: str, tokens: list[int], length: int, hidden: list[int]) -> torch.Tensor:
    """What the rows from `length` on, which do not see `hidden`, pay to all of the first `length` tokens, by
    transformers' queries and keys in float64; mean over rows, heads and layers."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, seen = zoo.build(name), []
    for layer in model.model.layers:
        take = lambda part, _args, given: seen.append((part, given["hidden_states"], given))  # noqa: E731
        layer.self_attn.register_forward_pre_hook(take, with_kwargs=True)
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
    mask[length:, hidden] = -torch.inf
    means = []
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), attention_mask=mask[None, None])
        for part, states, given in seen:
            q, k = (
                proj(states).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (part.q_proj, part.k_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *given["position_embeddings"])
            keys = k[0, :, :length].repeat_interleave(2, 0).double()
            scores = q[0, :, length:].double() @ keys.transpose(1, 2) * part.scaling
            means.append(scores.softmax(-1).mean((0, 1)))
    return torch.stack(means).mean(0).float()


def test_the_target_itself_tells_where_it_looks(target):
    """Its drafts read few keys; what they would look at is all of the history."""
    drafter = build_drafter("self", {"kv": "streaming", "budget": 8}, DrafterContext(target, None, 512))
    assert drafter.watch()
    engine = oracle.engine(target, drafter, draft_tokens=3)
    request = engine.submit(LONG[2], GREEDY, frozenset())
    for _ in range(3):
        assert drafter.draft_attention(request, 3) is None, "nothing was drafted"
        engine.step()
    (tree,) = drafter.propose([request], engine.planner.plan([request]))
    length = request.lease.length
    read = select(POLICIES["streaming"], Signals(length, len(LONG[2])), 8).tolist()
    hidden = [n for n in range(length) if n not in read]
    wanted = _whole_attention("llama", [*request.tokens, *tree.tokens[:-1]], length, hidden)
    assert len(tree) == 3
    assert wanted[hidden].sum() > 0.3
    torch.testing.assert_close(drafter.draft_attention(request, length), wanted, atol=1e-5, rtol=1e-3)
    engine.abort(request)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_self_speculation_looks_ahead_for_dustin(params, target, caplog):
    """Alone, batched, after prefixes: one text, marked; and it goes by the look-ahead."""
    texts = {}
    for kv in ("dustin", "dustin-draft", "dustin-history"):
        engine = oracle.engine(
            target, "self", options={"kv": "quest", "budget": 8}, kv=kv, kv_budget=12, prefill_chunk=32
        )
        alone = [oracle.run(engine, [p], params)[0] for p in LONG]
        batch = oracle.run(engine, LONG, params)
        again = oracle.run(engine, LONG[::-1], params)[::-1]
        texts[kv] = [r.output_ids for r in alone]
        for requests in (alone, batch, again):
            assert not any(r.lossless for r in requests)
            assert [r.output_ids for r in requests] == texts[kv]
        assert again[0].stats.reused > 0
    assert texts["dustin"] != texts["dustin-history"]
    assert texts["dustin-draft"] != texts["dustin-history"]
    assert "does not look ahead" not in caplog.text


def test_a_drafter_without_attention_is_told(target, caplog):
    with caplog.at_level(logging.WARNING):
        oracle.engine(target, "ngram", kv="dustin")
    assert "does not look ahead" in caplog.text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse") / "tiny.gguf"
    gguf_files.write(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        return LLM(path, drafter="none").loaded


def test_the_library_refuses_and_warns(tiny, caplog):
    with pytest.raises(InputError, match="unknown kv 'quests'") as error:
        LLM(tiny, drafter="none", kv="quests")
    assert error.value.hint == f"one of: {', '.join(KV_CHOICES)}"
    with pytest.raises(InputError, match="kv_budget must be at least 4, got 3"):
        LLM(tiny, drafter="none", kv="quest", kv_budget=3)
    with caplog.at_level(logging.WARNING):
        LLM(tiny, drafter="none", kv_budget=64)
        LLM(tiny, drafter="none", lossless=True)
    assert "kv_budget has no effect: kv is full" in caplog.text
    assert "lossless has no effect: kv is full" in caplog.text
    with pytest.raises(InputError, match=r"drafter 'suffix.self' cannot draft below kv 'quest'"):
        LLM(tiny, drafter="suffix+self", kv="quest", lossless=True)
    with pytest.raises(InputError, match=r"kv must be one of streaming, .*, got 'full'"):
        LLM(tiny, drafter="self", drafter_options={"kv": "full"})
    with pytest.raises(InputError, match="kv_budget must be at least 4, got 2"):
        LLM(tiny, drafter="self", drafter_options={"budget": "2"})


def test_the_library_marks_lossy_answers(tiny, caplog):
    ids = [i % 40 + 3 for i in range(30)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    lossy = LLM(tiny, drafter="ngram", kv="quest", kv_budget=8).generate(ids, params)[0]
    whole = LLM(tiny, drafter="ngram", kv="quest", kv_budget=64).generate(ids, params)[0]
    assert (lossy.lossless, whole.lossless) == (False, True)
    plain = LLM(tiny, drafter="none").generate(ids, params)[0]
    assert whole.token_ids == plain.token_ids
    caplog.clear()
    for drafter in ("none", "ngram", "suffix"):
        below = LLM(tiny, drafter=drafter, kv="quest", kv_budget=8, lossless=True, draft_tokens=4)
        answer = below.generate(ids, params)[0]
        assert (answer.token_ids, answer.lossless) == (plain.token_ids, True)
        assert answer.stats.drafted > 0
    assert "draft_tokens has no effect" not in caplog.text, "a full pass verifies so many at once"


def test_the_command_line_marks_lossy_answers(foretell, gguf_model):  # noqa: F811
    args = ("generate", "the " * 20, "-m", gguf_model, "--max-tokens", "6", "--ignore-eos")
    _, _, err = foretell(*args, "--kv", "streaming", "--kv-budget", "8")
    assert "LOSSY" in err
    _, out, _ = foretell(*args, "--kv", "h2o", "--kv-budget", "8", "--json")
    assert json.loads(out)["lossless"] is False
    _, plain, _ = foretell(*args, "--json")
    _, out, _ = foretell(*args, "--kv", "h2o", "--kv-budget", "8", "--lossless", "--json")
    assert json.loads(out)["lossless"] is True
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    code, _, err = foretell(*args, "--kv", "some")
    assert code == 2
    assert "streaming" in err
