"""The loss of a batch: of heads that draft token by token, and of MEDUSA's.

One objective serves EAGLE-1 (states and a little of the tokens, one depth), EAGLE-3 (tokens, several depths)
and MTP modules (tokens, few depths): they differ in weights.

Shape suffixes: T rows of the batch, R rows of a depth, X rows that give keys, J rows that judge, V draft
vocabulary, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.heads.base import FeatureHead, layer_output
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
        among: a later depth goes on only from rows where the target's token was among so many of the
            likeliest: a tree would not have come further from the others. 0 = from all (the papers).
    """

    depths: int = 1
    decay: float = 1.0
    token: float = 1.0
    state: float = 0.0
    noise: float = 0.0
    among: int = 0


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
        head, weights, rows = self._head, self._weights, batch.rows(0)
        attention = DraftAttention(batch, head.scale, head.window)
        meter = Meter(self._teacher, self._loss, weights, batch, rows.at_R + 1)
        # every row gives keys to those behind it, only those of the answers are judged
        every_T = torch.arange(len(batch.token_T), device=batch.token_T.device)
        before_XW, from_X = self._noisy(head.features(batch.hidden_TW, batch.aux_TW), batch, chance), every_T
        for depth in range(weights.depths):
            out_RW = self._step(batch, attention, depth, before_XW, from_X, rows)
            hopeful_R = meter.add(depth, rows, rows.at_R + 1 + depth, self._logits(out_RW))
            if weights.state:
                state_RW = batch.hidden_TW[rows.at_R + 1 + depth]
                meter.weigh(depth, weights.state, regression(out_RW, state_RW))
            fewer = batch.further(rows, depth + 1, hopeful_R)
            if not len(fewer.at_R):
                break
            before_XW = head.feedback(out_RW)[torch.searchsorted(rows.at_R, fewer.at_R)]
            rows, from_X = fewer, fewer.at_R
        return meter.judged()

    def _step(
        self,
        batch: Batch,
        attention: DraftAttention,
        depth: int,
        feature_XW: Tensor,
        from_X: Tensor,
        rows: Rows,
    ) -> Tensor:
        """The head's output [R, W] for `rows`, of the rows that give keys."""

        def attend(q_RHD: Tensor, k_XKD: Tensor, v_XKD: Tensor) -> Tensor:
            return attention(rows, depth, q_RHD, k_XKD, v_XKD)

        position_X = batch.position_T[from_X] + depth
        cos_PD, sin_PD = self._rope.upto(max(batch.sizes) + self._weights.depths)
        angles = cos_PD[position_X], sin_PD[position_X]
        wanted_R = None if depth else rows.at_R
        return layer_output(
            self._head, self._embed(batch, from_X, depth), feature_XW, angles, attend, wanted_R
        )

    def _embed(self, batch: Batch, from_X: Tensor, depth: int) -> Tensor:
        """Embeddings of the tokens that the rows take; what stands behind a sample's end is never judged."""
        token_X = batch.token_T[(from_X + 1 + depth).clamp(max=len(batch.token_T) - 1)]
        own = self._head.embedding
        embed_XW = self._teacher.embed(token_X) if own is None else own(token_X)
        if self._head.zero_first:
            embed_XW = embed_XW.masked_fill((batch.position_T[from_X] + depth == 0)[:, None], 0)
        return embed_XW

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
        first = rows = batch.rows(0)
        meter = Meter(self._teacher, self._loss, self._weights, batch, first.at_R + 1)
        for depth, state_RW in enumerate(self._heads.states(batch.hidden_TW[first.at_R])):
            if not len(rows.at_R):
                break
            keep_R = torch.searchsorted(first.at_R, rows.at_R)
            hopeful_R = meter.add(depth, rows, rows.at_R + 1 + depth, self._logits(depth, state_RW[keep_R]))
            rows = batch.further(rows, depth + 1, hopeful_R)
        return meter.judged()

    def _logits(self, depth: int, state_RW: Tensor) -> Tensor:
        if len(self._heads.outputs):
            logits_RV: Tensor = self._heads.outputs[depth](state_RW)[:, self._teacher.ids_V]
            return logits_RV
        return self._teacher.logits(state_RW)


class Meter:
    """Adds the losses of the depths, and counts how far drafts would have been right.

    Args:
        judge_J: rows whose states judge the first depth, rising; later depths are judged by some of them.
    """

    def __init__(
        self, teacher: Teacher, loss: TokenLoss, weights: Weights, batch: Batch, judge_J: Tensor
    ) -> None:
        self._token_loss, self._weights, self._batch, self._judge_J = loss, weights, batch, judge_J
        self._chance_JV = teacher.logits(batch.hidden_TW[judge_J]).softmax(-1)
        self._place_J = teacher.place(batch.best_T[judge_J])
        self._loss = torch.zeros((), device=teacher.target.device)
        self._right_T = torch.ones(len(batch.token_T), dtype=torch.bool, device=teacher.target.device)
        self._right: list[int] = []
        self._count: list[int] = []

    def add(self, depth: int, rows: Rows, judge_R: Tensor, logits_RV: Tensor) -> Tensor:
        """The token loss of one depth; returns which rows are worth going on from.

        Tokens outside the draft vocabulary cannot be drafted and do not count. Rows that were not gone on
        from count as rows without a loss: a later depth weighs what a draft comes to need of it.

        Args:
            judge_R: rows whose states judge these.
        """
        at_R = torch.searchsorted(self._judge_J, judge_R)
        place_R = self._place_J[at_R]
        all_R = self._batch.rows(depth).at_R + 1 + depth if depth else judge_R
        known = int((self._place_J[torch.searchsorted(self._judge_J, all_R)] >= 0).sum())
        loss_R = self._token_loss(logits_RV, self._chance_JV[at_R]) * (place_R >= 0)
        self._add(depth, self._weights.token, loss_R.sum() / max(1, known))
        self._count.append(len(all_R))
        self._right_T[rows.at_R] &= logits_RV.argmax(-1) == place_R
        self._right.append(int(self._right_T[rows.at_R].sum()))
        return self._hopeful(logits_RV.detach(), place_R)

    def weigh(self, depth: int, weight: float, loss_R: Tensor) -> None:
        """Another loss of the rows of the depth that was added last."""
        self._add(depth, weight, loss_R.sum() / max(1, self._count[-1]))

    def _add(self, depth: int, weight: float, mean: Tensor) -> None:
        self._loss = self._loss + weight * self._weights.decay**depth * mean

    def _hopeful(self, logits_RV: Tensor, place_R: Tensor) -> Tensor:
        if not self._weights.among:
            return torch.ones_like(place_R, dtype=torch.bool)
        own_R1 = logits_RV.gather(1, place_R.clamp(min=0)[:, None])
        return (place_R >= 0) & ((logits_RV > own_R1).sum(-1) < self._weights.among)

    def judged(self) -> Judged:
        """What came of it."""
        return Judged(self._loss, self._right, self._count)


Objective = Callable[[Batch, torch.Generator], Judged]
