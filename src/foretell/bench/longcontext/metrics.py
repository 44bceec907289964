"""Scores of an answer's text, 0 to 1: RULER's recall and LongBench's metrics, each by its published rule.

The best over several references counts, but for `recall`, which is the share of all of them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

# (answer, reference, class names) -> score
Metric = Callable[[str, str, Sequence[str]], float]
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def score(metric: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The score of an answer under a metric of `METRICS`."""
    if metric == "recall":
        return recall(answer, references)
    return max(_METRICS[metric](answer, reference, classes) for reference in references)


def recall(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, whatever the case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, in lower case without punctuation and articles (SQuAD, LongBench)."""
    mine, wanted = _normal(answer).split(), _normal(reference).split()
    common = sum((Counter(mine) & Counter(wanted)).values())
    return 2 * common / (len(mine) + len(wanted)) if common else 0.0


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F of the longest common subsequence of words (Lin 2004), as the package `rouge` has it for LongBench:
    sentence by sentence of the reference, the union of what the answer's sentences share with it, over the
    number of different words on either side; 0 for an empty answer."""
    mine, wanted = _sentences(answer), _sentences(reference)
    if not mine or not wanted:
        return 0.0
    union: set[str] = set()
    for sentence in wanted:
        for other in mine:
            union.update(_common_subsequence(sentence, other))
    own = {word for sentence in mine for word in sentence}
    theirs = {word for sentence in wanted for word in sentence}
    precision, found = len(union) / len(own), len(union) / len(theirs)
    return 2 * precision * found / (precision + found) if union else 0.0


def edit_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """2 M / T of the first line of code in the answer: T characters on both sides, M of them matched with
    insertions and deletions only (what fuzzywuzzy computes with python-Levenshtein), rounded to a percent."""
    lines = answer.lstrip("\n").split("\n")
    line = next((own for own in lines if not any(mark in own for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    matched = len(_common_subsequence(line, reference))
    return round(200 * matched / (len(line) + len(reference))) / 100


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / n where the reference is among the n class names in the answer; names that are but a part of the
    reference do not count."""
    named = [name for name in classes if name in answer]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def number(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the integers in the answer that are the reference's, the last one of "Paragraph 7"."""
    found, wanted = re.findall(r"\d+", answer), re.findall(r"\d+", reference)
    return found.count(wanted[-1]) / len(found) if found and wanted else 0.0


_METRICS: dict[str, Metric] = {
    "f1": f1,
    "rouge-l": rouge_l,
    "edit": edit_similarity,
    "classification": classification,
    "number": number,
}


def _normal(text: str) -> str:
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", kept).split())


def _sentences(text: str) -> list[list[str]]:
    return [words for part in text.split(".") if (words := part.split())]


def _common_subsequence(one: Sequence[str], two: Sequence[str]) -> list[str]:
    """A longest common subsequence."""
    lengths = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            longer = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if a == b else longer
    i, j, found = len(one), len(two), []
    while i and j:
        if one[i - 1] == two[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
