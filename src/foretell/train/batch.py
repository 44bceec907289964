"""Samples joined for one step of training, and which of their rows say something about the answer.

Row i of a sample holds the state of token i. A draft that begins behind token i + 1 foresees token i + 2 at
depth 0, i + 2 + s at depth s; the target's own opinion on it comes from the state of token i + 1 + s.

Shape suffixes: T rows of all samples, R rows that are judged, W hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.train.answers import Sample
from foretell.train.states import States


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one depth.

    Args:
        at_R: places among the rows of the batch, rising.
        counts: rows per sample.
    """

    at_R: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Joined samples.

    Args:
        sizes: tokens per sample.
        firsts: per sample, the first row that is judged (the prompt's last token).
        token_T, position_T: ids and places in their samples.
        hidden_TW, aux_TW, best_T: the target's, see `States`.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    token_T: Tensor
    position_T: Tensor
    hidden_TW: Tensor
    aux_TW: Mapping[int, Tensor]
    best_T: Tensor

    @property
    def starts(self) -> list[int]:
        """First row of each sample."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return starts[:-1]

    def rows(self, depth: int) -> Rows:
        """Rows of the answers that have a token to foresee at this depth; -1 is the next token itself."""
        device = self.token_T.device
        parts, counts = [], []
        for start, size, first in zip(self.starts, self.sizes, self.firsts, strict=True):
            # the last token's state judges nothing: what follows it is unknown
            end = max(first, size - 2 - depth)
            parts.append(torch.arange(start + first, start + end, device=device))
            counts.append(end - first)
        return Rows(torch.cat(parts), tuple(counts))

    def further(self, rows: Rows, depth: int, keep_R: Tensor) -> Rows:
        """Those of the rows kept of the depth before that have a token to foresee at this one."""
        sizes = torch.tensor(self.sizes, device=self.token_T.device)
        sample_T = torch.repeat_interleave(sizes)
        sample_R = sample_T[rows.at_R]
        keep_R = keep_R & (self.position_T[rows.at_R] + 2 + depth < sizes[sample_R])
        counts = torch.bincount(sample_R[keep_R], minlength=len(self.sizes))
        return Rows(rows.at_R[keep_R], tuple(counts.tolist()))


def join(samples: Sequence[Sample], states: Sequence[States]) -> Batch:
    """The batch of these samples."""
    device = states[0].hidden_TW.device
    sizes = tuple(len(sample.tokens) for sample in samples)
    tokens = [token for sample in samples for token in sample.tokens]
    layers = states[0].aux_TW
    return Batch(
        sizes,
        tuple(sample.prompt - 1 for sample in samples),
        torch.tensor(tokens, device=device),
        torch.cat([torch.arange(size, device=device) for size in sizes]),
        torch.cat([one.hidden_TW for one in states]),
        {layer: torch.cat([one.aux_TW[layer] for one in states]) for layer in layers},
        torch.cat([one.best_T for one in states]),
    )


def groups(sizes: Sequence[int], order: Sequence[int], rows: int) -> list[list[int]]:
    """`order` cut into batches of about `rows` tokens; every batch has at least one sample."""
    cut: list[list[int]] = [[]]
    held = 0
    for number in order:
        if cut[-1] and held + sizes[number] > rows:
            cut.append([])
            held = 0
        cut[-1].append(number)
        held += sizes[number]
    return cut
