"""The reduced draft vocabulary: the tokens that answers are made of.

Source: EAGLE-3 (Li et al. 2025) and FR-Spec (Zhao et al. 2025): most of a large vocabulary is hardly ever
said, and a head that ranks the rest reads far less memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.errors import InputError
from foretell.train.answers import Sample


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Target ids in rising order, and the share of the answers' tokens that they cover."""

    ids_V: Tensor
    coverage: float


def choose_vocabulary(
    samples: Iterable[Sample], size: int, vocab_size: int, always: Sequence[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers; rarer ones by id where there are too few.

    Args:
        always: ids that are in, whatever their frequency (end tokens).

    Raises:
        InputError: `size` is no size of a part of the vocabulary.
    """
    if not 0 < size <= vocab_size:
        raise InputError(
            f"draft_vocab must be between 1 and the target's vocabulary {vocab_size}, got {size}"
        )
    counts = _said(samples)
    first = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))
    rest = (token for token in range(vocab_size) if token not in counts and token not in always)
    while len(first) < size:
        first.append(next(rest))
    return _covering(torch.tensor(sorted(first[:size])), counts)


def known_vocabulary(ids_V: Tensor, samples: Iterable[Sample]) -> DraftVocabulary:
    """That of a head which has one already."""
    return _covering(ids_V, _said(samples))


def _said(samples: Iterable[Sample]) -> Counter[int]:
    """How often each token stands in the answers."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.tokens[sample.prompt :])
    return counts


def _covering(ids_V: Tensor, counts: Counter[int]) -> DraftVocabulary:
    return DraftVocabulary(ids_V, sum(counts[token] for token in ids_V.tolist()) / max(1, counts.total()))
