"""What users of other engines reported, as tests. The number is that of the report's row in the
project's list of complaints; rows that other files cover: 1-4 and 42 (test_exactness), 13-15, 28, 30,
33, 34 (test_engine), 24 and 25 (benchmarks)."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.attention import Segment, pack
from foretell.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from foretell.drafters.translate import SameVocabulary
from foretell.engine.detokenize import Detokenizer
from foretell.types import SamplingParams
from tests import oracle

PROMPT = [5, 17, 33, 8, 61]
# pieces of text per id: letters, a stop word in two pieces, and the bytes of a euro sign and an emoji
PIECES = {i: bytes([97 + i % 26]) for i in range(96)}
PIECES |= {40: b"ST", 41: b"OP", 42: "€".encode()[:1], 43: "€".encode()[1:], 44: "🙂".encode()[:2]}
PIECES |= {45: "🙂".encode()[2:], 46: b"xS", 47: b"TOPy"}


def decode(ids) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


class Say:
    """A target that says what it is told: its logits are one-hot at a script's next token."""

    impl, row_exact, num_layers, max_context, vocab_size = "test", True, 1, 4096, 96
    device = torch.device("cpu")

    def __init__(self, prompt_length: int, script: list[int]) -> None:
        self._prompt_length, self._script = prompt_length, script

    def new_arena(self, slots: int):
        from foretell.cache import KVArena

        return KVArena(1, 1, 8, slots, torch.float32, self.device)

    def forward(self, batch, needs=None):
        from foretell.models.base import ForwardOutput

        logits = torch.zeros(len(batch.logit_R), self.vocab_size)
        for row, position in enumerate(batch.position_cpu_T[batch.logit_R].tolist()):
            said = position + 1 - self._prompt_length
            logits[row, self._script[said] if 0 <= said < len(self._script) else 0] = 10.0
        return ForwardOutput(logits)


def say(script: list[int], params: SamplingParams, ends=frozenset(), draft: int = 8):
    """What becomes of a script, plainly and with drafts that are always right; both must agree."""
    target = Say(len(PROMPT), script)
    plain = oracle.run(oracle.engine(target, decode=decode), [PROMPT], params, ends)[0]
    fortune = oracle.Fortune({tuple(PROMPT): script}, 96, seed=0)
    fortune._tree = lambda request, budget: _chain(script[len(request.tokens) - len(PROMPT) :][:budget])
    engine = oracle.engine(target, fortune, decode=decode, draft_tokens=draft)
    drafted = oracle.run(engine, [PROMPT], params, ends)[0]
    for name in ("output_ids", "text", "finish_reason", "emitted"):
        assert getattr(drafted, name) == getattr(plain, name), name
    assert [e.token_id for e in drafted.logprobs] == [e.token_id for e in plain.logprobs]
    return drafted, engine


def _chain(tokens):
    from foretell.types import chain

    return chain(tokens)


def test_5_and_31_seeds_do_not_depend_on_the_neighbours(decoder):
    target = decoder("llama")
    seeded = SamplingParams(max_tokens=15, temperature=1.0, seed=42)
    (alone,) = oracle.run(oracle.engine(target, "ngram"), [PROMPT], seeded)
    mixed = [SamplingParams(max_tokens=9, temperature=1.0), seeded, SamplingParams(max_tokens=4), seeded]
    requests = oracle.run(oracle.engine(target, "ngram"), [[9, 9], PROMPT, [3], PROMPT], mixed)
    assert requests[1].output_ids == requests[3].output_ids == alone.output_ids
    first, second = (oracle.run(oracle.engine(target), [[9, 9]], mixed[0])[0] for _ in range(2))
    assert first.seed != second.seed, "without a seed each request draws its own"
    again = oracle.run(oracle.engine(target), [[9, 9]], mixed[0].replace(seed=first.seed))[0]
    assert again.output_ids == first.output_ids, "and reports it"


def test_n_answers_differ_and_the_first_is_that_of_the_seed(decoder):
    target, params = decoder("llama"), SamplingParams(max_tokens=12, temperature=1.0, seed=42)
    engine = oracle.engine(target)
    several = [engine.submit(PROMPT, params, frozenset(), answer) for answer in range(3)]
    while not engine.idle:
        engine.step()
    (alone,) = oracle.run(oracle.engine(target), [PROMPT], params)
    assert several[0].output_ids == alone.output_ids
    assert len({tuple(request.output_ids) for request in several}) == 3


@pytest.mark.parametrize("cap", [3, 4, 5, 20])
def test_6_stop_id_inside_an_accepted_run(cap):
    request, _ = say([10, 11, 63, 20, 21, 22, 23], SamplingParams(max_tokens=cap, stop=(63,)))
    assert request.output_ids == [10, 11, 63]
    assert request.finish_reason == "stop", "the cap must not mask the stop"
    assert request.text == decode([10, 11]), "nothing leaks behind the stop"


def test_6_end_token_inside_an_accepted_run():
    request, _ = say([10, 11, 2, 20, 21], SamplingParams(max_tokens=20), frozenset([2]))
    assert (request.output_ids, request.finish_reason, request.text) == (
        [10, 11, 2],
        "stop",
        decode([10, 11]),
    )
    ignored, _ = say([10, 11, 2, 20, 21], SamplingParams(max_tokens=5, ignore_eos=True), frozenset([2]))
    assert (ignored.output_ids, ignored.finish_reason) == ([10, 11, 2, 20, 21], "length")


def test_6_cap_inside_an_accepted_run():
    request, engine = say([10, 11, 12, 13, 14, 15, 16], SamplingParams(max_tokens=3))
    assert (request.output_ids, request.finish_reason) == ([10, 11, 12], "length")
    assert engine.stats.emitted == 3


@pytest.mark.parametrize(
    ("script", "kept", "text"),
    [
        ([10, 11, 40, 41, 20], [10, 11], "kl"),  # the stop string in two tokens of its own
        ([10, 46, 47, 20], [10, 46], "kx"),  # it begins and ends in the middle of tokens
        ([40, 41, 20], [], ""),  # at once
        ([10, 40, 20, 40, 41, 5], [10, 40, 20], "kSTu"),  # a false start before it
    ],
)
def test_7_stop_string_trims_ids_text_logprobs_and_usage_alike(script, kept, text):
    request, engine = say(script, SamplingParams(max_tokens=20, stop="STOP", logprobs=1))
    assert request.stats.accepted <= max(0, engine.stats.emitted)
    assert (request.output_ids, request.text, request.finish_reason) == (kept, text, "stop")
    assert len(request.logprobs) == len(request.drafted) == engine.stats.emitted == len(kept)


def test_7_stream_never_shows_what_a_stop_string_takes_back():
    script = [10, 11, 40, 20, 12, 46, 47, 13]
    target, params = Say(len(PROMPT), script), SamplingParams(max_tokens=20, stop="STOP")
    engine = oracle.engine(target, decode=decode)
    request = engine.submit(PROMPT, params, frozenset())
    text, ids = "", []
    while not engine.idle:
        engine.step()
        chunk = request.take()
        text += chunk.text
        ids += chunk.token_ids
        assert "klSTumxSTOP".startswith(text)
        assert len(chunk.drafted) == len(chunk.token_ids)
    assert text == request.text == "klSTumx"
    assert ids == request.output_ids == [10, 11, 40, 20, 12, 46]


def test_7_stop_before_min_tokens_is_not_heard():
    request, _ = say([40, 41, 10, 40, 41, 11], SamplingParams(max_tokens=20, min_tokens=4, stop="STOP"))
    assert (request.output_ids, request.text) == ([40, 41, 10], "STOPk")


def test_8_cache_is_rolled_back_to_what_was_emitted(decoder):
    """A finished request's slots hold its emitted tokens and nothing of the draft behind them."""
    target = decoder("llama")
    params = SamplingParams(max_tokens=7)
    engine = oracle.engine(target, oracle.draft_model(target, target), draft_tokens=5)
    (first,) = oracle.run(engine, [PROMPT], params)
    (kept,) = engine.cache._kept
    assert kept.tokens == first.tokens[: kept.length]
    following = [*first.tokens, 44, 45]
    (second,) = oracle.run(engine, [following], params)
    assert second.stats.reused == kept.length >= len(PROMPT)
    assert second.output_ids == oracle.generate(target, following, params)


def test_10_logprobs_are_the_targets_at_every_position(decoder):
    target = decoder("llama")
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=5, seed=1, logprobs=3)
    (plain,) = oracle.run(oracle.engine(target), [PROMPT], params)
    (drafted,) = oracle.run(oracle.engine(target, oracle.draft_model(target, target)), [PROMPT], params)
    assert drafted.stats.accepted > 0
    assert drafted.logprobs == plain.logprobs, "the same bits"
    tokens = list(PROMPT)
    for entry in plain.logprobs:
        row = (
            target.forward(pack([Segment(0, 0, list(tokens))], target.new_arena(40)))
            .logits_RV[0]
            .log_softmax(0)
        )
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert list(entry.top) == row.topk(3).indices.tolist()
        tokens.append(entry.token_id)


@pytest.mark.parametrize("padded", ["target", "draft"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_11_padded_vocabularies(padded, rule, decoder):
    """Qwen's 151,936 against 152,064 in small: one model has rows of logits that no token has."""
    sizes = {"target": 96, "draft": 96, padded: 104}
    target = decoder("llama", vocab_size=sizes["target"])
    draft = decoder("llama", vocab_size=sizes["draft"], num_hidden_layers=1)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    same = SameVocabulary(96, draft.vocab_size, target.vocab_size)
    drafter = DraftModelDrafter(draft, same, 256, DraftModelOptions(width=2))
    (request,) = oracle.run(oracle.engine(target, drafter, rule=rule), [PROMPT], params)
    assert request.stats.drafts > 0
    if rule == "coupled":
        assert request.output_ids == oracle.generate(target, PROMPT, params)
    else:  # the same distribution, so never a token that the filters exclude
        strict = params.replace(top_k=1)
        (only,) = oracle.run(oracle.engine(target, drafter, rule=rule), [PROMPT], strict)
        assert only.output_ids == oracle.generate(target, PROMPT, strict)


@pytest.mark.parametrize("prompt_length", [10, 30, 40])
def test_12_draft_context_shorter_than_the_targets(prompt_length, decoder):
    """The draft stops where its context ends; the request goes on plainly."""
    target, draft = decoder("llama"), decoder("llama", num_hidden_layers=1, max_position_embeddings=32)
    prompt = [3 + i % 50 for i in range(prompt_length)]
    params = SamplingParams(max_tokens=30)
    (request,) = oracle.run(oracle.engine(target, oracle.draft_model(draft, target)), [prompt], params)
    assert request.output_ids == oracle.generate(target, prompt, params)
    assert (request.stats.drafts > 0) == (prompt_length < 32)


@pytest.mark.parametrize("prompt", [[7], [7, 7], [7, 8, 7], [5, 6, 7, 5, 6]])
def test_17_ngram_with_short_prompts_and_no_end_token(prompt, decoder):
    target, params = decoder("llama"), SamplingParams(max_tokens=12)
    for options in ({"min_n": 1}, {"min_n": 2, "max_n": 2}, {"min_n": 1, "branches": 4, "trust": 9}):
        (request,) = oracle.run(
            oracle.engine(target, "ngram", options=options), [prompt], params, frozenset()
        )
        assert request.output_ids == oracle.generate(target, prompt, params)


def test_19_implausible_acceptance_raises_an_alarm(decoder, caplog):
    """A mis-wired draft model changes no token, so nothing else would tell."""
    target, stranger = decoder("llama"), decoder("llama", hidden_size=16, num_hidden_layers=1)

    def run(draft) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            oracle.run(
                oracle.engine(target, oracle.draft_model(draft, target), draft_tokens=2, kv_slots=2000),
                [[i, 2 * i, 5] for i in range(1, 9)],
                SamplingParams(max_tokens=40),
            )
        return [record.message for record in caplog.records]

    (warning,) = run(stranger)
    assert "does not fit this target" in warning
    assert run(target) == []


def test_27_text_never_holds_half_a_character():
    script = [10, 42, 43, 44, 45, 11, 42]
    target = Say(len(PROMPT), script)
    engine = oracle.engine(target, decode=decode)
    request = engine.submit(PROMPT, SamplingParams(max_tokens=7), frozenset())
    pieces = []
    while not engine.idle:
        engine.step()
        pieces.append(request.take().text)
    assert pieces == ["k", "", "€", "", "🙂", "l", "\ufffd"], "a broken end shows only at the end"
    assert request.text == decode(script)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 95), max_size=30))
def test_27_incremental_text_equals_the_whole(ids):
    detokenizer = Detokenizer(decode)
    for count, token in enumerate(ids, start=1):
        detokenizer.push(token)
        assert decode(ids[:count]).startswith(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == decode(ids)


def test_36_acceptance_is_reported_marginal_and_conditional(decoder):
    target = decoder("llama")
    wanted = {(5, 6): oracle.generate(target, [5, 6], SamplingParams(max_tokens=60))}
    engine = oracle.engine(target, oracle.Fortune(wanted, 96, seed=3), draft_tokens=6)
    (request,) = oracle.run(engine, [[5, 6]], SamplingParams(max_tokens=60))
    stats = request.stats
    assert stats.accepted == sum(request.drafted)
    assert stats.emitted - stats.accepted == stats.steps, "each step adds one token of the target's own"
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.marginal == sorted(stats.marginal, reverse=True)
    for depth, share in enumerate(stats.conditional):
        assert 0 <= share <= 1
        assert stats.proposed_at[depth] <= (stats.accepted_at[depth - 1] if depth else stats.drafts)
    assert stats.emitted == 60 == len(request.output_ids)
    assert stats.to_json()["plain_equivalent_steps"] == 60
