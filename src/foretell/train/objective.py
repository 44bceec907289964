"""The loss of a batch: of heads that draft token by token, and of MEDUSA's.

One objective serves EAGLE-1 (states and a little of the tokens, one depth), EAGLE-3 (tokens, several depths)
and MTP modules (tokens, few depths): they differ in weights.

Shape suffixes: T rows of the batch, R rows of a depth, V draft vocabulary, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.heads.base import FeatureHead
from foretell.heads.medusa import MedusaHeads
from foretell.heads.vocabulary import head_rows
from foretell.models.base import TargetModel
from foretell.models.rope import RopeTable
from foretell.train.attention import DraftAttention
from foretell.train.batch import Batch, Rows
from foretell.train.losses import TokenLoss, regression


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts how much.

    Args:
        depths: tokens ahead that are trained; EAGLE-3's training-time test has 7.
        decay: weight of a depth beside the one before.
        token, state: weights of the token loss and of the regression of states.
        noise: half-width of uniform noise on the states, for a sample of 512 tokens (EAGLE-1).
    """

    depths: int = 1
    decay: float = 1.0
    token: float = 1.0
    state: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """Of one batch.

    Args:
        loss: to be minimised.
        right: per depth, rows whose likeliest token was the target's, all depths before right too.
        count: per depth, rows.
    """

    loss: Tensor
    right: list[int]
    count: list[int]


class Teacher:
    """The target's opinion over the draft vocabulary.

    Args:
        target: the model; its output head is taken to be linear, without bias.
        ids_V: target ids of the draft vocabulary, in rising order.
    """

    def __init__(self, target: TargetModel, ids_V: Tensor) -> None:
        self.target, self.ids_V = target, ids_V.to(target.device)
        self.head_VW = head_rows(target, self.ids_V).float().clone()
        place_V = torch.full((target.vocab_size,), -1, device=target.device)
        place_V[self.ids_V] = torch.arange(len(ids_V), device=target.device)
        self._place_V = place_V

    def logits(self, state_RW: Tensor) -> Tensor:
        """Over the draft vocabulary [R, V]."""
        return state_RW @ self.head_VW.T

    def embed(self, token_T: Tensor) -> Tensor:
        """The target's embedding [T, W], as a head reads it."""
        return self.target.embed(token_T).float().clone()

    def place(self, token_R: Tensor) -> Tensor:
        """Draft ids of target ids; -1 where there is none."""
        return self._place_V[token_R]


class FeatureObjective:
    """Of a `FeatureHead`: several depths, each fed with what the one before gave."""

    def __init__(self, head: FeatureHead, teacher: Teacher, weights: Weights, loss: TokenLoss) -> None:
        self._head, self._teacher, self._weights, self._loss = head, teacher, weights, loss
        self._rope = RopeTable(head.rope, head.rotated, teacher.target.device)

    def __call__(self, batch: Batch, chance: torch.Generator) -> Judged:
        """The loss of a batch."""
        head, weights = self._head, self._weights
        attention = DraftAttention(batch, head.scale, head.window)
        feature_TW = self._noisy(head.features(batch.hidden_TW, batch.aux_TW), batch, chance)
        # what stands behind the last token of a sample is never judged
        every = Rows(torch.arange(len(batch.token_T), device=batch.token_T.device), batch.sizes)
        embed_TW, angles = self._embed(batch, every, 0), self._angles(batch, every, 0)
        out_TW = head.step(embed_TW, feature_TW, angles, attention.first)
        rows = batch.rows(0)
        out_RW, meter = out_TW[rows.at_R], Meter(self._teacher, self._loss, weights)
        for depth in range(weights.depths):
            if depth:
                fewer = batch.rows(depth)
                keep_R = _kept(rows, fewer, out_RW.device)
                before_RW, rows = head.feedback(out_RW)[keep_R], fewer
                if not len(rows.at_R):
                    break

                def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows = rows, depth: int = depth) -> Tensor:
                    return attention.later(rows, depth, q, k, v)

                embed_RW, angles = self._embed(batch, rows, depth), self._angles(batch, rows, depth)
                out_RW = head.step(embed_RW, before_RW, angles, attend)
                meter.keep(keep_R)
            meter.add(depth, batch, rows.at_R + 1 + depth, self._logits(out_RW))
            if weights.state:
                state_RW = batch.hidden_TW[rows.at_R + 1 + depth]
                meter.loss = (
                    meter.loss + weights.state * weights.decay**depth * regression(out_RW, state_RW).mean()
                )
        return meter.judged()

    def _embed(self, batch: Batch, rows: Rows, depth: int) -> Tensor:
        """Embeddings of the tokens that the rows take."""
        at_R = (rows.at_R + 1 + depth).clamp(max=len(batch.token_T) - 1)
        token_R = batch.token_T[at_R]
        own = self._head.embedding
        embed_RW = self._teacher.embed(token_R) if own is None else own(token_R)
        if self._head.zero_first:
            embed_RW = embed_RW.masked_fill((batch.position_T[rows.at_R] + depth == 0)[:, None], 0)
        return embed_RW

    def _angles(self, batch: Batch, rows: Rows, depth: int) -> tuple[Tensor, Tensor]:
        position_R = batch.position_T[rows.at_R] + depth
        cos_PD, sin_PD = self._rope.upto(max(batch.sizes) + self._weights.depths)
        return cos_PD[position_R], sin_PD[position_R]

    def _logits(self, out_RW: Tensor) -> Tensor:
        own_RV = self._head.logits(out_RW)
        return self._teacher.logits(self._head.normed(out_RW)) if own_RV is None else own_RV

    def _noisy(self, feature_TW: Tensor, batch: Batch, chance: torch.Generator) -> Tensor:
        if not self._weights.noise:
            return feature_TW
        size_T = torch.repeat_interleave(torch.tensor(batch.sizes), torch.tensor(batch.sizes))
        width_T1 = (self._weights.noise * 512 / size_T)[:, None].to(feature_TW.device)
        noise_TW = torch.rand(feature_TW.shape, generator=chance).to(feature_TW.device)
        return feature_TW + (2 * noise_TW - 1) * width_T1


class MedusaObjective:
    """Head k foresees the token that the target chooses k + 1 places on; depths are heads."""

    def __init__(self, heads: MedusaHeads, teacher: Teacher, weights: Weights, loss: TokenLoss) -> None:
        self._heads, self._teacher, self._weights, self._loss = heads, teacher, weights, loss

    def __call__(self, batch: Batch, chance: torch.Generator) -> Judged:
        """The loss of a batch."""
        first = before = batch.rows(0)
        meter = Meter(self._teacher, self._loss, self._weights)
        for depth, state_RW in enumerate(self._heads.states(batch.hidden_TW[first.at_R])):
            rows = batch.rows(depth)
            if not len(rows.at_R):
                break
            meter.keep(_kept(before, rows, state_RW.device))
            keep_R = _kept(first, rows, state_RW.device)
            meter.add(depth, batch, rows.at_R + 1 + depth, self._logits(depth, state_RW[keep_R]))
            before = rows
        return meter.judged()

    def _logits(self, depth: int, state_RW: Tensor) -> Tensor:
        if len(self._heads.outputs):
            logits_RV: Tensor = self._heads.outputs[depth](state_RW)[:, self._teacher.ids_V]
            return logits_RV
        return self._teacher.logits(state_RW)


class Meter:
    """Adds the token losses of the depths, and counts how far drafts would have been right."""

    def __init__(self, teacher: Teacher, loss: TokenLoss, weights: Weights) -> None:
        self._teacher, self._token_loss, self._weights = teacher, loss, weights
        self.loss = torch.zeros((), device=teacher.target.device)
        self._alive_R: Tensor | None = None
        self._right: list[int] = []
        self._count: list[int] = []

    def keep(self, keep_R: Tensor) -> None:
        """The next depth has only these of the rows of the last one."""
        if self._alive_R is not None:
            self._alive_R = self._alive_R[keep_R]

    def add(self, depth: int, batch: Batch, judge_R: Tensor, logits_RV: Tensor) -> None:
        """One depth; `judge_R` are the rows whose states judge it. Tokens outside the draft vocabulary
        cannot be drafted and do not count in the loss."""
        place_R = self._teacher.place(batch.best_T[judge_R])
        known_R = place_R >= 0
        target_RV = self._teacher.logits(batch.hidden_TW[judge_R])
        loss_R = self._token_loss(logits_RV, target_RV)
        mean = (loss_R * known_R).sum() / known_R.sum().clamp(min=1)
        self.loss = self.loss + self._weights.token * self._weights.decay**depth * mean
        right_R = logits_RV.argmax(-1) == place_R
        self._alive_R = right_R if self._alive_R is None else self._alive_R & right_R
        self._right.append(int(self._alive_R.sum()))
        self._count.append(len(right_R))

    def judged(self) -> Judged:
        """What came of it."""
        return Judged(self.loss, self._right, self._count)


Objective = Callable[[Batch, torch.Generator], Judged]


def _kept(rows: Rows, fewer: Rows, device: torch.device) -> Tensor:
    """Places of the rows of a depth among those of an earlier one."""
    keep, start = [], 0
    for many, few in zip(rows.counts, fewer.counts, strict=True):
        keep.append(torch.arange(start, start + few, device=device))
        start += many
    return torch.cat(keep)
