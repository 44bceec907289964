"""The counting automaton against a naive count, the pool against its limit, drafts by hand."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters.automaton import ROOT, Cursor, SuffixAutomaton
from foretell.drafters.suffix import SuffixDrafter, SuffixOptions
from foretell.errors import InputError
from foretell.types import StepPlan

TEXT = st.lists(st.integers(0, 3), max_size=31)  # counts are exact up to 32 contexts per token


def occurrences(texts: list[list[int]], part: list[int]) -> int:
    size = len(part)
    return sum(text[i : i + size] == part for text in texts for i in range(len(text) - size + 1))


def walk(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = ROOT
    for token in part:
        state = automaton.step(state, token)
        if state < 0:
            return -1
    return state


def read(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.read(token)
    return automaton


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), part=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_counts_and_continuations_are_those_of_the_texts(texts, part):
    automaton = read(texts)
    state = walk(automaton, part)
    wanted = occurrences(texts, part)
    if wanted == 0:
        assert state == -1
        return
    assert automaton.count(state) == wanted
    following = {token: automaton.count(behind) for token, behind in automaton.children(state)}
    assert following == {token: n for token in range(4) if (n := occurrences(texts, [*part, token]))}


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_the_repeated_suffix_is_the_longest(text):
    automaton = read([text])
    longest = next((n for n in range(len(text) - 1, 0, -1) if occurrences([text], text[-n:]) > 1), 0)
    assert automaton.length(automaton.repeated) == longest


@settings(max_examples=150, deadline=None)
@given(pool=st.lists(TEXT, min_size=1, max_size=3), text=TEXT, cut=st.integers(0, 31), more=TEXT)
def test_a_cursor_finds_the_longest_match_while_the_pool_grows(pool, text, cut, more):
    automaton = read(pool)
    cursor = Cursor(automaton, depth=8)
    cursor.follow(text[:cut])
    automaton.begin()
    for token in more:
        automaton.read(token)
    cursor.follow(text[cut:])
    state, matched = cursor.match()
    texts = [*pool, more]
    longest = next((n for n in range(min(8, len(text)), 0, -1) if occurrences(texts, text[-n:])), 0)
    # tokens that were read before `more` came may have lost a longer match that `more` brought
    found = next((n for n in range(min(8, len(text)), 0, -1) if occurrences(pool, text[-n:])), 0)
    assert found <= matched <= longest
    assert state == walk(automaton, text[len(text) - matched :]) if matched else state == ROOT


@pytest.mark.parametrize("vocabulary", [2, 30, 1000, 50_000])
def test_the_account_of_memory_is_never_too_low(vocabulary):
    pick = random.Random(vocabulary)
    text = [pick.randrange(vocabulary) for _ in range(20_000)]
    tracemalloc.start()
    automaton = read([text])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= automaton.nbytes <= 3 * taken


@dataclass
class Request:
    """As much of a request as the drafter looks at."""

    id: int
    tokens: list[int]
    end_ids: frozenset[int] = frozenset()


def draft(drafter: SuffixDrafter, request: Request, budget: int = 16):
    ((tree, score),) = drafter.propose_scored([request], [StepPlan(budget, "test")])
    return tree, score


def started(tokens: list[int], ends=(), **options) -> tuple[SuffixDrafter, Request]:
    drafter, request = SuffixDrafter(SuffixOptions(**options)), Request(0, tokens, frozenset(ends))
    drafter.start(request)
    return drafter, request


def test_drafts_by_hand():
    tree, score = draft(*started([1, 2, 3, 4, 5, 9, 1, 2, 3]))
    assert tree.tokens == (4, 5, 9, 1, 2, 3, 4, 5, 9, 1, 2, 3), "three tokens match, so twelve are drafted"
    chances = [math.prod(n / (n + 1.7) for n in range(3, 4 + depth)) for depth in range(12)]
    assert tree.confidence == pytest.approx(chances), "the longer the context, the likelier it goes on so"
    assert score == pytest.approx(sum(chances))
    assert draft(*started([1, 2, 3, 4, 5, 9, 1, 2, 3], factor=1.0, offset=-1.0))[0].tokens == (4, 5)
    assert draft(*started([1, 2, 3, 4, 5, 9, 1, 2, 3]), budget=1)[0].tokens == (4,)
    assert draft(*started([1, 2, 3, 4, 5, 9, 1, 2, 3], ends=[5]))[0].tokens == (4, 5), (
        "nothing follows an end"
    )
    assert not len(draft(*started([1, 2, 3, 4, 5, 9]))[0])


def test_probabilities_decide_how_far():
    """After 1 2 came 3 twice and 4 once; after that, always 5 or 6."""
    text = [1, 2, 3, 5, 0, 1, 2, 4, 6, 7, 1, 2, 3, 5, 8, 1, 2]
    two, three = 2 / 3.7, 3 / 4.7  # what a context of so many tokens is worth
    tree, score = draft(*started(text, min_prob=2 / 3 * two * three, levels=1))
    assert tree.tokens == (3, 5), "what followed 3 5 came once in three"
    assert score == pytest.approx(2 / 3 * two * (1 + three))
    assert not len(draft(*started(text, min_prob=0.37, levels=1))[0])
    tree, score = draft(*started(text, min_prob=0.08, levels=1))
    found = {tuple(tree.tokens[i] for i in tree.path(n)): tree.confidence[n] for n in range(len(tree))}
    assert list(found)[:2] == [(3,), (3, 5)], "the likeliest first"
    assert found[4,] == pytest.approx(1 / 3 * two)
    assert found[3, 5, 0] == pytest.approx(1 / 3 * two * three * 4 / 5.7)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_what_would_not_be_verified_is_not_drafted():
    drafter, request = started([1, 2, 3, 1, 2, 4, 1, 2], factor=9)
    (whole,) = drafter.propose([request], [StepPlan(16, "")])
    for worth in (0.2, 0.4, 1.1):
        (tree,) = drafter.propose([request], [StepPlan(16, "", worth=worth)])
        likely = [t for t, c in zip(whole.tokens, whole.confidence, strict=True) if c >= worth]
        assert list(tree.tokens) == likely
    assert len(whole) > 2


def test_histories_are_read_when_drafts_are_made_and_not_before():
    drafter, request = started([1, 2, 3, 1, 2], factor=9)
    drafter.propose([request], [StepPlan(0, "")])
    assert drafter._histories[0].read == 0, "nothing is drafted, so reading can wait"
    (tree,) = drafter.propose([request], [StepPlan(16, "", worth=2.0)])
    assert len(tree) == 0, "nothing is worth so much"
    assert drafter._histories[0].read == 5, "which is how reading alone is measured"


def test_what_other_requests_said_is_drafted_too():
    drafter, first = started([7, 8])
    first.tokens += [1, 2, 3, 4, 5, 6]
    drafter.finish(first)
    second = Request(1, [9, 1, 2, 3])
    drafter.start(second)
    assert draft(drafter, second)[0].tokens == (4, 5, 6)
    off, first = started([7, 8], pool_mb=0)
    first.tokens += [1, 2, 3, 4, 5, 6]
    off.finish(first)
    second = Request(1, [9, 1, 2, 3])
    off.start(second)
    assert not len(draft(off, second)[0])


def test_the_pool_keeps_its_limit_and_forgets_the_oldest():
    """ArcticInference#164, #165: the tree grew without bound."""
    drafter = SuffixDrafter(SuffixOptions(pool_mb=1))
    pick = random.Random(0)
    texts = [[pick.randrange(5000) for _ in range(200)] for _ in range(60)]
    for number, text in enumerate(texts):
        request = Request(number, text[:4])
        drafter.start(request)
        request.tokens = list(text)
        drafter.finish(request)
        assert drafter.pool.nbytes <= 1_000_000
    assert len(drafter.pool.generations) == 2

    def continued(text: list[int]) -> bool:
        request = Request(1000, text[50:56])
        drafter.start(request)
        tree, _ = draft(drafter, request)
        drafter.finish(request)
        return tree.tokens[:4] == tuple(text[56:60])

    assert continued(texts[-1])
    assert not continued(texts[0])
    assert drafter._histories == {}


@pytest.mark.parametrize(
    "options",
    [
        {"factor": -1.0},
        {"min_prob": 1.5},
        {"depth": 0},
        {"levels": 0},
        {"pool_mb": 0.5},
        {"pool_mb": -1.0},
        {"factor": float("inf")},
        {"offset": float("nan")},
        {"pool_mb": float("inf")},
    ],
)
def test_bad_options(options):
    with pytest.raises(InputError, match=next(iter(options))):
        SuffixOptions(**options)
