"""A suffix automaton that counts: every substring of what it has read, and how often it occurred.

Reading a token costs amortised O(1) (Blumer et al. 1985). A state stands for all substrings that end at
the same places; the one behind a transition tells how often the continuation was seen. Most states have
one transition, which lies in flat arrays; only the others have a dictionary.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

ROOT = 0
_NONE = -1
# upper bounds of what CPython 3.11+ takes, checked by a test
_BYTES_PER_DICT, _BYTES_PER_ENTRY = 240, 120
_BRANCHES = 24  # followers of one context that are told apart
# A repetition of one token makes a chain of suffix links as long as itself; occurrences are counted for
# so many of the longest contexts, which are the ones that drafts are made from.
_COUNTED = 32


class SuffixAutomaton:
    """Reads tokens; `begin` starts another text in the same automaton."""

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._count = array("i", [0])
        self._token = array("i", [_NONE])  # a state's first transition
        self._target = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}  # and its others
        self._entries = 0
        self._last = ROOT

    def __len__(self) -> int:
        return len(self._length)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, never less than what is really taken."""
        arrays = (self._length, self._link, self._count, self._token, self._target)
        flat = sum(sys.getsizeof(part) for part in (*arrays, self._more))
        return flat + len(self._more) * _BYTES_PER_DICT + self._entries * _BYTES_PER_ENTRY

    def begin(self) -> None:
        """What is read next belongs to a new text."""
        self._last = ROOT

    def read(self, token: int) -> None:
        """Appends a token to the current text."""
        before = self._last
        known = self.step(before, token)
        if known != _NONE:  # an earlier text went this way
            longer = self._length[before] + 1
            self._last = known if self._length[known] == longer else self._split(before, token, known)
        else:
            self._last = self._grow(token)
        state, left = self._last, _COUNTED
        count, link = self._count, self._link
        while state > ROOT and left:
            count[state] += 1
            state = link[state]
            left -= 1

    def step(self, state: int, token: int) -> int:
        """The state behind a transition, or -1."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def children(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, state behind it) for every continuation that was seen."""
        if self._target[state] != _NONE:
            yield self._token[state], self._target[state]
            if more := self._more.get(state):
                yield from more.items()

    def continuations(self, state: int) -> list[tuple[float, int, int]]:
        """(share, token, state behind it) of what followed; of very many followers only the most frequent.
        Empty = the text ended there."""
        behind = self._target[state]
        if behind == _NONE:
            return []
        more, count = self._more.get(state), self._count
        if more is None:
            return [(1.0, self._token[state], behind)]
        found = [(count[behind], self._token[state], behind)]
        found += [(count[other], token, other) for token, other in more.items()]
        total = sum(times for times, _, _ in found)
        if len(found) > _BRANCHES:
            found = [max(found)]
        return [(times / total, token, other) for times, token, other in found]

    def count(self, state: int) -> int:
        """How often the state's substrings occurred."""
        return self._count[state]

    def shorter(self, state: int) -> int:
        """The state of the longest suffix that occurred elsewhere too; ROOT's is ROOT."""
        return max(self._link[state], ROOT)

    def length(self, state: int) -> int:
        """Length of the state's longest substring."""
        return self._length[state]

    @property
    def repeated(self) -> int:
        """The state of the longest suffix of the current text that occurred before."""
        return self.shorter(self._last)

    def _grow(self, token: int) -> int:
        new = self._add(self._length[self._last] + 1, 0)
        state = self._last
        while state != _NONE and self.step(state, token) == _NONE:
            self._connect(state, token, new)
            state = self._link[state]
        if state == _NONE:
            self._link[new] = ROOT
            return new
        behind = self.step(state, token)
        if self._length[behind] != self._length[state] + 1:
            behind = self._split(state, token, behind)
        self._link[new] = behind
        return new

    def _split(self, state: int, token: int, old: int) -> int:
        """Gives the shorter substrings of `old` a state of their own."""
        clone = self._add(self._length[state] + 1, self._count[old])
        self._link[clone] = self._link[old]
        self._token[clone], self._target[clone] = self._token[old], self._target[old]
        if more := self._more.get(old):
            self._more[clone] = dict(more)
            self._entries += len(more)
        self._link[old] = clone
        while state != _NONE and self.step(state, token) == old:
            self._connect(state, token, clone)
            state = self._link[state]
        return clone

    def _add(self, length: int, count: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._count.append(count)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._target[state] == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
            return
        more = self._more.setdefault(state, {})
        self._entries += token not in more
        more[token] = target


class Cursor:
    """Follows a text through an automaton that has read others: the longest suffix of the text that
    occurred there.

    Args:
        depth: longest match that is kept; longer ones say no more.
    """

    def __init__(self, automaton: SuffixAutomaton, depth: int) -> None:
        self.automaton = automaton
        self.state = ROOT
        self.matched = 0
        self._depth = depth

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes on with these tokens."""
        automaton = self.automaton
        for token in tokens:
            while (behind := automaton.step(self.state, token)) == _NONE and self.state != ROOT:
                self.state = automaton.shorter(self.state)
                self.matched = automaton.length(self.state)
            if behind != _NONE:
                self.state = behind
                self.matched += 1
            self._settle()

    def _settle(self) -> None:
        """States split while others read; and a match beyond the depth is shortened."""
        automaton = self.automaton
        self.matched = min(self.matched, self._depth)
        while self.state != ROOT and self.matched <= automaton.length(automaton.shorter(self.state)):
            self.state = automaton.shorter(self.state)

    def match(self) -> tuple[int, int]:
        """(state, matched length)."""
        self._settle()
        return self.state, self.matched
