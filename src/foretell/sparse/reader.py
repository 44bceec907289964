"""Follows the requests of one model, gathers the signals that a policy needs, and selects what is read.

The queries of a few layers come out of the forward pass that happens anyway; the keys lie in the arena.
Without a profile all heads of the middle layer are asked; so are they by policies that go by no profile.

Shape suffixes: T rows, N positions, H query heads, K key/value heads, D head size, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from foretell.attention import Queries
from foretell.cache import KVArena, Lease
from foretell.errors import InputError
from foretell.sparse.lookahead import Heads
from foretell.sparse.policies import LEAST_BUDGET, OBSERVED, POLICIES, Dustin, Policy, goes_by_profile, select
from foretell.sparse.profile import Profile
from foretell.sparse.signals import PageBounds, Signals, add_attention, page_scores
from foretell.types import NO_NEEDS, Needs


class Reader(Protocol):
    """Says what each request reads; see `KVReader`.

    Attributes:
        needs: what `observe` wants of the passes.
        draft_heads: see `KVReader`.
    """

    @property
    def needs(self) -> Needs: ...
    @property
    def draft_heads(self) -> tuple[Heads, ...]: ...
    @property
    def wants_draft(self) -> bool: ...
    def start(self, request_id: int, prompt: int) -> None: ...
    def finish(self, request_id: int) -> None: ...
    def ready(self, request_id: int) -> bool: ...
    def observe(
        self,
        request_id: int,
        queries: Mapping[int, Queries],
        rows: Sequence[int],
        arena: KVArena,
        lease: Lease,
    ) -> None: ...
    def select(
        self, request_id: int, arena: KVArena, lease: Lease, lookahead_N: Tensor | None = None
    ) -> Tensor | None:
        """The places that the next pass reads; None = all."""
        ...


@dataclass(slots=True)
class _History:
    """What is remembered of a request.

    Attributes:
        prompt: length of the prompt.
        observed: whether anything was.
        last: per layer, the queries of the last confirmed tokens, `OBSERVED` at most.
        received_N: attention summed over the queries seen so far.
        window_N: see `Signals`; fixed once the prompt has been read.
        bounds: per layer, of the pages of keys.
        last_N: attention of the last confirmed token, once it was asked for.
    """

    prompt: int
    observed: bool = False
    last: dict[int, Queries] = field(default_factory=dict)
    received_N: Tensor | None = None
    window_N: Tensor | None = None
    bounds: dict[int, PageBounds] = field(default_factory=dict)
    last_N: Tensor | None = None


class KVReader:
    """Selects per request. Tokens are confirmed by `observe`; none is taken back.

    Args:
        policy: how.
        budget: positions that a pass reads beside its own block.
        layers: those of the model, of which the middle one is asked.
        profile: whom `dustin` and its ablations ask instead; and, for `dustin`, how much goes by the draft.

    Attributes:
        draft_heads: whom it wants to be asked of a draft; empty = whom the draft chooses.

    Raises:
        InputError: the budget is too small.
    """

    def __init__(self, policy: Policy, budget: int, layers: int, profile: Profile | None = None) -> None:
        if budget < LEAST_BUDGET:
            raise InputError(f"kv_budget must be at least {LEAST_BUDGET}, got {budget}")
        profile = profile if goes_by_profile(policy) else None
        if profile is not None and policy is POLICIES["dustin"]:
            policy = Dustin(profile.share(budget))
        self.policy = policy
        self.budget = budget
        asked = bool(policy.needs - {"lookahead"})
        prompts = bool(policy.needs & {"window", "received"})
        self._asked = Heads(layers // 2) if profile is None else profile.target_heads
        self.draft_heads = () if profile is None else profile.draft_heads
        self.needs = Needs(queries=(self._asked.layer,), prompts=prompts) if asked else NO_NEEDS
        self._histories: dict[int, _History] = {}

    @property
    def wants_draft(self) -> bool:
        """Whether the policy goes by a draft's attention too."""
        return "lookahead" in self.policy.needs

    def start(self, request_id: int, prompt: int) -> None:
        """Begins to follow a request."""
        self._histories[request_id] = _History(prompt)

    def resume(self, request_id: int, prompt: int, other: KVReader, known: int) -> None:
        """As `start`, for a request that finds a prefix in the cache of which `other` has observed every
        token, as its request `known`, and no token more."""
        source = other._histories[known]
        self._histories[request_id] = replace(
            source, prompt=prompt, observed=False, window_N=None, last=dict(source.last), bounds={}
        )

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
        history.observed, history.last_N = True, None
        for layer in self.needs.queries:
            new = queries[layer].at(rows)
            if "received" in self.policy.needs:
                _receive(history, new, _keys(arena, lease, layer), self._asked)
            old = history.last.get(layer)
            known_THD = new.q_THD if old is None else torch.cat([old.q_THD, new.q_THD])
            if "window" in self.policy.needs and history.window_N is None and lease.length >= history.prompt:
                # the step that ends the prompt may have confirmed a draft behind it
                read_THD = known_THD[: len(known_THD) - (lease.length - history.prompt)]
                own_KND = arena.keys(layer, lease.start, history.prompt)
                history.window_N = _mass(Queries(read_THD[-OBSERVED:], new.spec), own_KND, self._asked)
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
        if history.last_N is None:
            (layer,) = self.needs.queries
            last = history.last[layer]
            own = Queries(last.q_THD[-1:], last.spec)
            history.last_N = _mass(own, _keys(arena, lease, layer), self._asked)
        return history.last_N

    def _pages(self, history: _History, arena: KVArena, lease: Lease) -> Tensor:
        """Quest's scores, comparable between heads: [P]."""
        (layer,) = self.needs.queries
        last, bounds = history.last[layer], history.bounds.setdefault(layer, PageBounds())
        scores_JP = page_scores(
            last.q_THD[-1], bounds.of(_keys(arena, lease, layer)), last.spec, range(last.spec.heads)
        )
        return scores_JP.float().softmax(-1).mean(0)


def _keys(arena: KVArena, lease: Lease, layer: int) -> Tensor:
    return arena.keys(layer, lease.start, lease.length)


def _mass(last: Queries, keys_KND: Tensor, asked: Heads) -> Tensor:
    """Attention that the last tokens pay to each position, summed over them, averaged over heads: [N]."""
    total_N = torch.zeros(keys_KND.shape[1], device=keys_KND.device)
    _add_last(total_N, last, keys_KND, asked)
    return total_N


def _receive(history: _History, new: Queries, keys_KND: Tensor, asked: Heads) -> None:
    """Adds what these last queries pay to every position."""
    total_N = torch.zeros(keys_KND.shape[1], device=keys_KND.device)
    if history.received_N is not None:
        total_N[: len(history.received_N)] = history.received_N
    _add_last(total_N, new, keys_KND, asked)
    history.received_N = total_N


def _add_last(total_N: Tensor, last: Queries, keys_KND: Tensor, asked: Heads) -> None:
    end, rows = keys_KND.shape[1], len(last.q_THD)
    add_attention(total_N, last.q_THD, keys_KND, last.spec, asked.of(last.spec), range(end - rows, end))
