"""MEDUSA (Cai et al. 2024): heads guess the next tokens independently, from one state of the target.

Which combinations of guesses are tried is a sparse tree: a given one, or the most promising combinations by
how often each head's r-th guess has been right so far, counted while decoding.

Shape suffixes: K heads, W hidden width, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.drafters.grow import Fixed, Ranks, read_paths
from foretell.drafters.lent import LentHead
from foretell.heads.medusa import MedusaHeads, has_medusa, load_medusa
from foretell.heads.ready import check_form, form_for, make_ready
from foretell.models.base import TargetModel
from foretell.types import EMPTY_TREE, DraftTree, Needs, StepPlan

_TOP = 10  # guesses of a head that are looked at
# prior accuracy of each head's first guess (the MEDUSA repository's table for Vicuna-7B), of later
# guesses a third of the one before; worth so many observations
_PRIOR = (0.56, 0.32, 0.2, 0.15, 0.12)
_PRIOR_WEIGHT = 20


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of the MEDUSA drafter.

    Args:
        tree: "auto" (by measured accuracy), or a JSON file of paths of ranks.
        weights: how their matrices are kept: stored, fp32, fp16, int8, or "auto": int8 where compiled code
            runs them. Rounding changes what is drafted, never what is said.
    """

    tree: str = "auto"
    weights: str = "auto"

    def __post_init__(self) -> None:
        check_form(self.weights)


class Accuracy:
    """How often head k's guess of rank r was the token that came, where the guesses before were right."""

    def __init__(self, heads: int) -> None:
        self._right = [[0] * _TOP for _ in range(heads)]
        self._seen = [0] * heads

    def observe(self, head: int, rank: int | None) -> None:
        """One guess of `head` was judged; None = none of its guesses came."""
        self._seen[head] += 1
        if rank is not None:
            self._right[head][rank] += 1

    def __call__(self, head: int, rank: int) -> float:
        prior = _PRIOR[min(head, len(_PRIOR) - 1)] / 3**rank
        share: float = (self._right[head][rank] + _PRIOR_WEIGHT * prior) / (self._seen[head] + _PRIOR_WEIGHT)
        return share

    def best_paths(self, heads: int, nodes: int) -> list[Ranks]:
        """The combinations most likely to be right all along, beginnings first."""
        paths: list[Ranks] = []
        waiting: list[tuple[float, Ranks]] = [(-self(0, 0), (0,))]
        while waiting and len(paths) < nodes:
            negative, path = heapq.heappop(waiting)
            paths.append(path)
            head, rank = len(path) - 1, path[-1]
            if rank + 1 < _TOP and (own := self(head, rank)) > 0:
                sibling = negative / own * self(head, rank + 1)
                heapq.heappush(waiting, (max(sibling, negative), (*path[:-1], rank + 1)))
            if head + 1 < heads:
                heapq.heappush(waiting, (negative * self(head + 1, 0), (*path, 0)))
        return paths


class MedusaDrafter:
    """See `Drafter`. Keeps of each request the last hidden state, and what the heads guessed from it."""

    needs = Needs(last_hidden=True)
    expects = 0.05

    def __init__(
        self,
        heads: MedusaHeads,
        target: TargetModel,
        paths: Sequence[Ranks] | None,
        weights: str,
        *,
        learning: bool = True,
    ) -> None:
        self._heads, self._paths, self._learning = heads, paths, learning
        self._lent = LentHead(target, heads.target_ids, weights)
        self.accuracy = Accuracy(heads.count)
        self.draft_tokens = len(paths) if paths is not None else 16
        self._hidden: dict[int, tuple[int, Tensor]] = {}  # tokens when the state came, and the state
        self._guesses: dict[int, tuple[int, list[list[int]]]] = {}

    def start(self, request: DraftRequest) -> None:
        """Nothing is known before the target has read the prompt."""

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """The most promising combinations of the heads' guesses."""
        ready = [
            (request, plan.draft_tokens, self._hidden[request.id][1])
            for request, plan in zip(requests, plans, strict=True)
            if plan.draft_tokens and self._hidden.get(request.id, (0,))[0] == len(request.tokens)
        ]
        trees: dict[int, DraftTree] = {}
        if ready:
            logits_KRV = self._logits(torch.stack([hidden_W for _, _, hidden_W in ready]))
            for row, (request, budget, _) in enumerate(ready):
                guesses = self._rank(request, [logits_RV[row] for logits_RV in logits_KRV])
                self._guesses[request.id] = len(request.tokens), guesses
                trees[request.id] = self._tree(guesses, budget, request.end_ids)
        return [trees.get(request.id, EMPTY_TREE) for request in requests]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Takes the state of the last token read, and counts which guesses came true."""
        assert seen.hidden_TW is not None
        # the state is of the last token read: more of a prompt may still be to come
        self._hidden[request.id] = seen.start + seen.count + 1, seen.hidden_TW[-1].clone()
        if seen.verdict is None or request.id not in self._guesses or not self._learning:
            return
        length, guesses = self._guesses.pop(request.id)
        for head, (came, ranked) in enumerate(zip(request.tokens[length:], guesses, strict=False)):
            self.accuracy.observe(head, ranked.index(came) if came in ranked else None)

    def finish(self, request: DraftRequest) -> None:
        """Forgets the request."""
        self._hidden.pop(request.id, None)
        self._guesses.pop(request.id, None)

    def forget(self) -> None:
        """Begins to count anew how often guesses come true."""
        self.accuracy = Accuracy(self._heads.count)

    @torch.inference_mode()
    def _logits(self, hidden_RW: Tensor) -> list[Tensor]:
        """[R, V] per head."""
        states = self._heads.states(hidden_RW)
        if len(self._heads.outputs):
            return [out(state_RW).float() for out, state_RW in zip(self._heads.outputs, states, strict=True)]
        return list(self._lent(torch.cat(states)).split(len(hidden_RW)))

    def _rank(self, request: DraftRequest, logits_KV: Sequence[Tensor]) -> list[list[int]]:
        """Guesses per head, the likeliest first; the heads before are taken to be right."""
        guesses: list[list[int]] = []
        for logits_V in logits_KV:
            ahead = [tokens[0] for tokens in guesses]
            ranked = self._lent.rank(request.sampler, logits_V, ahead, _TOP)
            if not ranked:  # the request's grammar allows nothing
                break
            guesses.append([token for token, _ in ranked])
        return guesses

    def _tree(self, guesses: list[list[int]], budget: int, end_ids: frozenset[int]) -> DraftTree:
        paths = self._paths if self._paths is not None else self.accuracy.best_paths(len(guesses), budget)
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        place: dict[Ranks, int] = {(): -1}
        for path in paths:
            above = place.get(path[:-1])
            if above is None or len(path) > len(guesses) or path[-1] >= len(guesses[len(path) - 1]):
                continue  # nothing follows an end token, or the heads guess no further
            if len(tokens) == budget:
                break
            tokens.append(guesses[len(path) - 1][path[-1]])
            parents.append(above)
            before = confidence[above] if above >= 0 else 1.0
            confidence.append(before * min(1.0, self.accuracy(len(path) - 1, path[-1])))
            if tokens[-1] not in end_ids:
                place[path] = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(confidence))


def build(context: DrafterContext, argument: str | None, options: MedusaOptions) -> MedusaDrafter:
    """See `DrafterEntry.build`; see `DrafterContext.head_folder` for those without an argument."""
    target = context.target
    heads = load_medusa(
        context.head_folder("medusa", argument, has_medusa), target.hidden_size, target.vocab_size
    )
    weights = form_for(options.weights, target.device, target.dtype)
    make_ready(heads, target.device, target.dtype, weights)
    paths = None if options.tree == "auto" else Fixed(read_paths(Path(options.tree))).paths
    return MedusaDrafter(heads, target, paths, weights, learning=context.learning)
