"""Follows the requests of one model, gathers the signals that a policy needs, and selects what is read.

The queries of a few layers come out of the forward pass that happens anyway; the keys lie in the arena.
Without a profile of retrieval heads, all heads of the middle layer are asked.

Shape suffixes: T rows, N positions, H query heads, K key/value heads, D head size, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.attention import Queries
from foretell.cache import KVArena, Lease
from foretell.errors import InputError
from foretell.sparse.policies import LEAST_BUDGET, OBSERVED, Policy, select
from foretell.sparse.signals import PAGE, Signals, attention_mass, page_bounds, page_scores
from foretell.types import NO_NEEDS, Needs

_SCORES_AT_ONCE = 1 << 22  # bounds the score matrix of a long prompt


@dataclass(slots=True)
class _History:
    """What is remembered of a request.

    Attributes:
        prompt: length of the prompt.
        observed: whether anything was.
        last: per layer, the queries of the last confirmed tokens, `OBSERVED` at most.
        received_N: attention summed over the queries seen so far.
        window_N: see `Signals`; fixed once the prompt has been read.
        bounds: per layer, lowest and highest key of the pages that are full.
    """

    prompt: int
    observed: bool = False
    last: dict[int, Queries] = field(default_factory=dict)
    received_N: Tensor | None = None
    window_N: Tensor | None = None
    bounds: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class KVReader:
    """Selects per request. Tokens are confirmed by `observe`; none is taken back.

    Args:
        policy: how.
        budget: positions that a pass reads beside its own block.
        layers: those of the model, of which the middle one is asked.

    Raises:
        InputError: the budget is too small.
    """

    def __init__(self, policy: Policy, budget: int, layers: int) -> None:
        if budget < LEAST_BUDGET:
            raise InputError(f"kv_budget must be at least {LEAST_BUDGET}, got {budget}")
        self.policy = policy
        self.budget = budget
        asked = bool(policy.needs - {"lookahead"})
        prompts = bool(policy.needs & {"window", "received"})
        self.needs = Needs(queries=(layers // 2,), prompts=prompts) if asked else NO_NEEDS
        self._histories: dict[int, _History] = {}

    @property
    def wants_draft(self) -> bool:
        """Whether the policy goes by a draft's attention too."""
        return "lookahead" in self.policy.needs

    def start(self, request_id: int, prompt: int) -> None:
        """Begins to follow a request."""
        self._histories[request_id] = _History(prompt)

    def finish(self, request_id: int) -> None:
        """Forgets a request."""
        self._histories.pop(request_id, None)

    def ready(self, request_id: int) -> bool:
        """Whether a pass over the request was observed; a cached prefix alone tells nothing."""
        return self._histories[request_id].observed

    @torch.inference_mode()
    def observe(
        self,
        request_id: int,
        queries: Mapping[int, Queries],
        rows: Sequence[int],
        arena: KVArena,
        lease: Lease,
    ) -> None:
        """Takes in confirmed tokens: the last `len(rows)` of the lease, whose queries are at these rows."""
        history = self._histories[request_id]
        history.observed = True
        for layer in self.needs.queries:
            new, keys_KND = queries[layer].at(rows), _keys(arena, lease, layer)
            if "received" in self.policy.needs:
                _receive(history, new, keys_KND)
            old = history.last.get(layer)
            known_THD = new.q_THD if old is None else torch.cat([old.q_THD, new.q_THD])
            if "window" in self.policy.needs and history.window_N is None and lease.length >= history.prompt:
                # the step that ends the prompt may have confirmed a draft behind it
                read_THD = known_THD[: len(known_THD) - (lease.length - history.prompt)]
                own_KND = keys_KND[:, : history.prompt]
                history.window_N = _mass(Queries(read_THD[-OBSERVED:], new.spec), own_KND)
            history.last[layer] = Queries(known_THD[-OBSERVED:], new.spec)

    @torch.inference_mode()
    def select(
        self, request_id: int, arena: KVArena, lease: Lease, lookahead_N: Tensor | None = None
    ) -> Tensor | None:
        """The positions of the lease's tokens that the next pass reads; None = all."""
        if lease.length <= self.budget:
            return None
        history, needs = self._histories[request_id], self.policy.needs
        signals = Signals(
            lease.length,
            history.prompt,
            history_N=self._history(history, arena, lease) if "history" in needs else None,
            lookahead_N=lookahead_N,
            window_N=history.window_N,
            received_N=history.received_N,
            pages_P=self._pages(history, arena, lease) if "pages" in needs else None,
        )
        return select(self.policy, signals, self.budget)

    def _history(self, history: _History, arena: KVArena, lease: Lease) -> Tensor:
        """Attention of the last confirmed token: [N]."""
        (layer,) = self.needs.queries
        last = history.last[layer]
        return _mass(Queries(last.q_THD[-1:], last.spec), _keys(arena, lease, layer))

    def _pages(self, history: _History, arena: KVArena, lease: Lease) -> Tensor:
        """Quest's scores, comparable between heads: [P]. Bounds of full pages are kept."""
        (layer,) = self.needs.queries
        keys_KND, last = _keys(arena, lease, layer), history.last[layer]
        known = history.bounds.get(layer)
        start = 0 if known is None else known[0].shape[1] * PAGE
        low, high = page_bounds(keys_KND[:, start:])
        if known is not None:
            low, high = torch.cat([known[0], low], 1), torch.cat([known[1], high], 1)
        full = keys_KND.shape[1] // PAGE
        history.bounds[layer] = low[:, :full], high[:, :full]
        scores_JP = page_scores(last.q_THD[-1], (low, high), last.spec, range(last.spec.heads))
        return scores_JP.float().softmax(-1).mean(0)


def _keys(arena: KVArena, lease: Lease, layer: int) -> Tensor:
    return arena.keys(layer, lease.start, lease.length)


def _mass(last: Queries, keys_KND: Tensor) -> Tensor:
    """Attention that the last tokens pay to each position, summed over them, averaged over heads: [N]."""
    end, spec = keys_KND.shape[1], last.spec
    places = range(end - len(last.q_THD), end)
    return attention_mass(last.q_THD, keys_KND, spec, range(spec.heads), places).sum(0).mean(0)


def _receive(history: _History, new: Queries, keys_KND: Tensor) -> None:
    """Adds what these last queries pay to every position."""
    rows, length, spec = len(new.q_THD), keys_KND.shape[1], new.spec
    total_N = torch.zeros(length, device=keys_KND.device)
    if history.received_N is not None:
        total_N[: len(history.received_N)] = history.received_N
    step = max(1, _SCORES_AT_ONCE // (spec.heads * length))
    for row in range(0, rows, step):
        part_THD = new.q_THD[row : row + step]
        first = length - rows + row
        mass = attention_mass(
            part_THD, keys_KND, spec, range(spec.heads), range(first, first + len(part_THD))
        )
        total_N += mass.sum(0).mean(0)
    history.received_N = total_N
