"""Selection policies against sentences in Python, signals against float64, Quest's bound on every page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.kernels import HeadSpec
from foretell.sparse import KV_CHOICES, POLICIES, KVReader, Signals, attention_mass, select
from foretell.sparse.policies import protection
from foretell.sparse.signals import page_bounds, page_scores
from tests import selection_oracle as oracle


@st.composite
def worlds(draw):
    """A budget, and signals of a history; all scores differ, so that there is one right answer."""
    budget, length = draw(st.integers(4, 60)), draw(st.integers(1, 150))
    prompt = draw(st.integers(1, length))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def scores(count):
        return (torch.randperm(8 * count, generator=generator)[:count] + 1) / (8.0 * count)

    looks = scores(length) if draw(st.booleans()) else None
    pages = scores(-(-length // 16))
    return budget, Signals(length, prompt, scores(length), looks, scores(prompt), scores(length), pages)


@settings(max_examples=150, deadline=None)
@given(world=worlds())
def test_policies_are_their_sentences(world):
    budget, signals = world
    length = signals.length
    got = {name: select(policy, signals, budget) for name, policy in POLICIES.items()}
    for positions in got.values():
        assert len(positions) == min(budget, length)
        assert positions.tolist() == sorted(set(positions.tolist()))
        if length <= budget:
            assert positions.tolist() == list(range(length))
        assert oracle.protected(length, budget) <= set(positions.tolist()) or length <= budget
    if length <= budget:
        return
    sets = {name: set(positions.tolist()) for name, positions in got.items()}
    assert sets["streaming"] == oracle.streaming(length, budget)
    assert sets["h2o"] == oracle.h2o(length, budget, signals.received_N.tolist())
    assert sets["quest"] == oracle.quest(length, budget, signals.pages_P.tolist())
    looks = None if signals.lookahead_N is None else signals.lookahead_N.tolist()
    for name, share in (("dustin", 0.5), ("dustin-draft", 1.0), ("dustin-history", 0.0)):
        kept, first, second = oracle.dustin(length, budget, looks, signals.history_N.tolist(), share)
        assert not set(first) & set(second)
        assert not kept & {*first, *second}
        assert sets[name] == {*kept, *first, *second}
    wanted, pooled = oracle.snapkv(length, budget, signals.prompt, signals.window_N.tolist())
    # pooled scores may tie: the same number from each part, and none better was left out
    assert {n for n in sets["snapkv"] if n >= signals.prompt} == {n for n in wanted if n >= signals.prompt}
    chosen = [pooled[n] for n in sets["snapkv"] - oracle.protected(length, budget) if n < signals.prompt]
    best = [pooled[n] for n in wanted - oracle.protected(length, budget) if n < signals.prompt]
    assert sum(chosen) == pytest.approx(sum(best), abs=1e-6)


def test_dustin_by_hand():
    """Budget 8 of 12: 2 sinks, 2 recent; then two by the draft, two by the target, none of them twice."""
    looks = torch.tensor([9.0, 0, 0, 5, 0, 7, 0, 0, 0, 0, 9, 9])
    history = torch.tensor([9.0, 9, 0, 8, 3, 6, 0, 2, 0, 0, 9, 9])
    signals = Signals(12, 10, history, looks)
    assert select(POLICIES["dustin"], signals, 8).tolist() == [0, 1, 3, 4, 5, 7, 10, 11]
    assert select(POLICIES["dustin-history"], signals, 8).tolist() == [0, 1, 3, 4, 5, 7, 10, 11]
    assert select(POLICIES["streaming"], signals, 8).tolist() == [0, 1, 6, 7, 8, 9, 10, 11]
    alone = Signals(12, 10, history)
    assert select(POLICIES["dustin-draft"], alone, 8).tolist() == [0, 1, 3, 4, 5, 7, 10, 11]


def test_the_draft_goes_first():
    """Where the two disagree, the draft's choice is in and takes half."""
    looks, history = torch.arange(40.0), torch.arange(40.0).flip(0)
    positions = select(POLICIES["dustin"], Signals(40, 40, history, looks), 12)
    # protected 0-2 and 37-39; the draft likes the late ones, the target the early ones
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 34, 35, 36, 37, 38, 39]


def test_protection_is_at_most_half_of_the_budget():
    assert [protection(k) for k in (4, 8, 128, 512)] == [(1, 1), (2, 2), (4, 32), (4, 64)]
    with pytest.raises(InputError, match="kv_budget must be at least 4, got 3"):
        KVReader(POLICIES["streaming"], 3, 2)
    with pytest.raises(InputError, match="unknown kv 'qest'"):
        POLICIES["qest"]
    assert KV_CHOICES[0] == "full"


SPEC = HeadSpec(6, 2, 8, 0.3)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 70), seed=st.integers(0, 1000), head=st.integers(0, 5))
def test_quest_bounds_every_page(length, seed, head):
    """In float64, so that rounding is no excuse: no key of a page scores above its page."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, length, 8, dtype=torch.float64, generator=generator)
    q = torch.randn(6, 8, dtype=torch.float64, generator=generator)
    scores = page_scores(q, page_bounds(keys), SPEC, [head])[0]
    assert len(scores) == -(-length // 16)
    for position in range(length):
        true = float(q[head] @ keys[head // 3, position]) * 0.3
        assert true <= float(scores[position // 16]) + 1e-12


def test_quest_score_by_hand():
    """Two channels, two keys: max over each channel apart, as no single key has it."""
    keys = torch.tensor([[[1.0, -2.0], [3.0, 5.0]]])
    spec = HeadSpec(1, 1, 2, 1.0)
    low, high = page_bounds(keys)
    assert (low.tolist(), high.tolist()) == ([[[1.0, -2.0]]], [[[3.0, 5.0]]])
    assert page_scores(torch.tensor([[2.0, -1.0]]), (low, high), spec, [0]).tolist() == [[2 * 3 + 2.0]]


@pytest.mark.parametrize(
    "extra",
    [{}, {"window": 5}, {"softcap": 2.0}, {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_attention_mass_is_attention(extra):
    """Of chosen heads, row by row in float64; each query head reads its own key/value head."""
    torch.manual_seed(1)
    spec = HeadSpec(6, 2, 8, 0.3, **extra)
    q, keys = torch.randn(3, 6, 8), torch.randn(2, 20, 8)
    heads, last = [4, 0, 3], [9, 14, 19]
    mass = attention_mass(q, keys, spec, heads, last)
    for row, end in enumerate(last):
        for index, head in enumerate(heads):
            scores = keys[head // 3].double() @ q[row, head].double() * 0.3
            if spec.softcap:
                scores = 2.0 * torch.tanh(scores / 2.0)
            weights = scores.exp()
            weights[end + 1 :] = 0
            if spec.window:
                weights[: end - 4] = 0
            total = weights.sum() + (0 if spec.sinks_H is None else spec.sinks_H[head].double().exp())
            torch.testing.assert_close(mass[row, index].double(), weights / total, atol=1e-6, rtol=1e-5)
