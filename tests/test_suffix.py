"""The counting automaton against a naive count, the pool against its limit, drafts by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters.automaton import ROOT, Cursor, SuffixAutomaton

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
