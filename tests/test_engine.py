"""Token identity: whatever the drafter, tree, rule, batch, chunk or cache, the answer is plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.noise import Stream
from foretell.types import SamplingParams, chain
from foretell.verify import RULES
from tests import oracle

PROMPTS = oracle.PROMPTS
SETTINGS = {
    "greedy": SamplingParams(max_tokens=20),
    "seeded": SamplingParams(max_tokens=20, temperature=0.9, seed=7),
    "filtered": SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, seed=8),
    "penalised": SamplingParams(
        max_tokens=20,
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        seed=9,
    ),
    "greedy penalised": SamplingParams(max_tokens=20, repetition_penalty=1.5, logit_bias={4: 3.0}),
    "end held off": SamplingParams(max_tokens=20, temperature=1.5, min_tokens=6, seed=10),
}
ENDS = frozenset([2, 11, 30, 31])


@pytest.fixture(scope="module")
def answers(decoder):
    """(architecture, setting) -> prompt -> oracle's answer."""
    made = {}

    def get(name: str, setting: str) -> dict[tuple[int, ...], list[int]]:
        if (name, setting) not in made:
            made[name, setting] = {
                tuple(p): oracle.generate(decoder(name), p, SETTINGS[setting], ENDS) for p in PROMPTS
            }
        return made[name, setting]

    return get


def drafters(decoder, target, answers):
    """Every kind of drafter; the draft models are another random model and the target itself."""
    yield "none", "none", {}
    yield "ngram", "ngram", {"min_n": 1}
    yield "ngram tree", "ngram", {"min_n": 1, "branches": 3}
    other = decoder("llama", hidden_size=16, num_hidden_layers=1)
    yield "strange draft", oracle.draft_model(other, target), {}
    yield "strange draft, wide", oracle.draft_model(other, target, width=2), {}
    yield "perfect draft", oracle.draft_model(target, target), {}
    yield "perfect draft, wide", oracle.draft_model(target, target, width=3), {}
    yield "fortune", oracle.Fortune(answers, 96, seed=1), {}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen2-window"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_drafter_alone_and_batched(name, setting, decoder, answers):
    target, wanted = decoder(name), answers(name, setting)
    for label, drafter, options in drafters(decoder, target, wanted):
        engine = oracle.engine(target, drafter, options=options)
        for batch in ([p] for p in PROMPTS):
            (request,) = oracle.run(engine, batch, SETTINGS[setting], ENDS)
            assert request.output_ids == wanted[tuple(batch[0])], f"{label}, alone"
        for request in oracle.run(engine, PROMPTS, SETTINGS[setting], ENDS):
            prompt = tuple(request.tokens[: request.prompt_length])
            assert request.output_ids == wanted[prompt], f"{label}, batched, with prefix hits"
        assert engine.cache.reused > 0, "the second round should have found prefixes"


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("setting", ["greedy", "greedy penalised"])
def test_other_rules_are_identical_when_greedy(rule, setting, decoder, answers):
    target, wanted = decoder("llama"), answers("llama", setting)
    for label, drafter, options in drafters(decoder, target, wanted):
        engine = oracle.engine(target, drafter, options=options, rule=rule)
        for request in oracle.run(engine, PROMPTS, SETTINGS[setting], ENDS):
            assert request.output_ids == wanted[tuple(request.tokens[: request.prompt_length])], label


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_repeat_under_a_seed_whatever_the_batch(rule, decoder):
    target = decoder("llama")
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3)
    alone = [
        oracle.run(
            oracle.engine(target, oracle.draft_model(target, target, width=2), rule=rule), [p], params
        )[0]
        for p in PROMPTS
    ]
    engine = oracle.engine(target, oracle.draft_model(target, target, width=2), rule=rule)
    together = oracle.run(engine, PROMPTS, params)
    assert [r.output_ids for r in together] == [r.output_ids for r in alone]
    assert engine.stats.accepted > 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    setting=st.sampled_from(sorted(SETTINGS)),
    chunk=st.integers(1, 12),
    batch=st.integers(1, 4),
    draft=st.integers(0, 9),
    limits=st.lists(st.integers(1, 20), min_size=4, max_size=4),
)
def test_adversarial_drafts_in_any_schedule(seed, setting, chunk, batch, draft, limits, decoder, answers):
    """Random trees around the truth, prompts read in chunks of any size, requests of any length."""
    target, wanted = decoder("llama"), answers("llama", setting)
    drafter = oracle.Fortune(wanted, 96, seed)
    engine = oracle.engine(target, drafter, draft_tokens=draft, prefill_chunk=chunk, max_batch=batch)
    params = [
        SETTINGS[setting].replace(max_tokens=n, min_tokens=min(n, SETTINGS[setting].min_tokens))
        for n in limits
    ]
    for request, limit in zip(oracle.run(engine, PROMPTS, params, ENDS), limits, strict=True):
        expected = wanted[tuple(request.tokens[: request.prompt_length])][:limit]
        assert request.output_ids == expected
        assert request.finish_reason == ("stop" if expected[-1] in ENDS else "length")
        assert request.stats.emitted == len(expected)
        assert request.stats.accepted <= request.stats.drafted
        steps = [(start, count) for rid, start, count in drafter.observed if rid == request.id]
        position = steps[0][0] if steps else 0
        for start, count in steps:
            assert start == position, "a drafter sees every token that the target reads, once"
            position += count


def test_perfect_draft_is_accepted_whole(decoder):
    """The target as its own draft: every draft is kept, so 21 tokens take four steps of 5 + 1."""
    target = decoder("llama")
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=5)):
        engine = oracle.engine(target, oracle.draft_model(target, target), draft_tokens=5)
        (request,) = oracle.run(engine, [PROMPTS[0]], params)
        assert request.stats.accepted == request.stats.drafted == 20
        assert request.stats.steps == 4
        assert request.stats.al == 6.0
        assert request.stats.marginal == request.stats.conditional == [1.0] * 5
        assert request.drafted == ([True] * 5 + [False]) * 4


def test_drafts_drawn_with_the_targets_noise_meet_it_more_often(decoder):
    """The target as its own draft, under the coupled rule: with the shared noise every draft is kept, with
    noise of its own only as many as two independent draws agree."""
    target = decoder("llama")
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=11)
    kept = {}
    for stream in (Stream.TARGET, Stream.DRAFT):
        rule = replace(RULES["coupled"], draft_stream=stream)
        engine = oracle.engine(target, oracle.draft_model(target, target), draft_tokens=1)
        engine.rule = rule
        oracle.run(engine, [[i, i + 1, i + 2] for i in range(1, 5)], params)
        kept[stream] = engine.stats.accepted / engine.stats.drafts
    assert kept[Stream.TARGET] == 1.0
    assert kept[Stream.DRAFT] < 0.6


def test_a_drafter_that_oversteps_is_named(decoder):
    """Too many nodes would reach into a neighbour's slots."""
    target = decoder("llama")
    for tokens in ([5] * 9, [96], [-1]):
        drafter = oracle.Fortune({}, 96, seed=0)
        drafter._tree = lambda request, budget, tokens=tokens: chain(tokens)
        engine = oracle.engine(target, drafter, draft_tokens=5)
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=20), frozenset())
        with pytest.raises(ValueError, match="Fortune drafted"):
            engine.step()


def test_requests_wait_for_room_and_all_finish(decoder, answers):
    target, wanted = decoder("llama"), answers("llama", "greedy")
    engine = oracle.engine(target, "ngram", kv_slots=40, draft_tokens=4)
    requests = [engine.submit(p, SETTINGS["greedy"], ENDS) for p in PROMPTS]
    engine.step()
    assert sum(r.lease is not None for r in requests) == 1, "two of them do not fit side by side"
    while not engine.idle:
        engine.step()
        engine.cache.check_integrity()
    assert [r.output_ids for r in requests] == [wanted[tuple(p)] for p in PROMPTS]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(decoder):
    engine = oracle.engine(decoder("llama"), kv_slots=40)
    with pytest.raises(InputError, match=r"needs 68 KV slots .* the cache has 40"):
        engine.submit([1] * 13, SamplingParams(max_tokens=50), frozenset())
    assert engine.idle


def test_abort_frees_the_slots_at_once(decoder, answers):
    target = decoder("llama")
    engine = oracle.engine(target, "ngram", kv_slots=40, draft_tokens=4)
    first = engine.submit(PROMPTS[0], SETTINGS["greedy"], ENDS)
    second = engine.submit(PROMPTS[1], SETTINGS["greedy"], ENDS)
    waiting = engine.submit(PROMPTS[2], SETTINGS["greedy"], ENDS)
    engine.step()
    assert second.lease is None, "it waits"
    engine.abort(first)
    engine.abort(waiting)
    engine.cache.check_integrity()
    engine.step()
    assert second.lease is not None, "the slots were free for the next step"
    while not engine.idle:
        engine.step()
    assert first.finish_reason == waiting.finish_reason == "abort"
    assert second.output_ids == answers("llama", "greedy")[tuple(PROMPTS[1])]


def test_one_token_one_token_prompt_and_end_first(decoder):
    target = decoder("llama")
    (first,) = oracle.generate(target, [7], SamplingParams(max_tokens=1))
    for drafter in ("none", "ngram", oracle.draft_model(target, target)):
        (request,) = oracle.run(oracle.engine(target, drafter), [[7]], SamplingParams(max_tokens=1))
        assert (request.output_ids, request.finish_reason) == ([first], "length")
        (ended,) = oracle.run(
            oracle.engine(target, drafter), [[7]], SamplingParams(max_tokens=9), frozenset([first])
        )
        assert (ended.output_ids, ended.finish_reason) == ([first], "stop")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([1] * 300, SamplingParams(max_tokens=1), "300 tokens, the model's context holds 256"),
        (
            [1] * 250,
            SamplingParams(max_tokens=7),
            r"prompt \(250 tokens\) and max_tokens \(7\) exceed .* 256",
        ),
        ([1, 96], SamplingParams(max_tokens=1), "token 96 is outside the vocabulary of 96"),
        ([1], SamplingParams(max_tokens=1, logit_bias={96: 1.0}), "logit_bias token 96 is outside"),
        ([1], SamplingParams(max_tokens=1, stop=(96,)), "stop token 96 is outside"),
        ([1], SamplingParams(max_tokens=1, stop="x"), "need a tokenizer"),
    ],
)
def test_bad_requests_are_refused_at_the_door(prompt, params, message, decoder):
    engine = oracle.engine(decoder("llama"))
    with pytest.raises(InputError, match=message):
        engine.submit(prompt, params, frozenset())
    assert engine.idle
