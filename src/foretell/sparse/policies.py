"""Selection policies: signals and a budget of k slots -> one set of positions per request, for all layers
and heads. Pure functions of their arguments.

Every set has min(k, length) positions and holds the first tokens (attention sinks) and the most recent
ones; a history that fits the budget is read whole. A policy says how the rest is filled. Keys keep the
positions at which they were rotated.

The published baselines select per layer and head, and drop for good what they do not select. Here they
keep their rule and share one set, as Dustin does; nothing is dropped, so what was left out can come back.
Where a paper is silent, and where a rule had to be adapted:

- Sinks: 4, window: 64, but each at most a quarter of the budget.
- `snapkv` scores the prompt once, by its last 32 queries, pooled over 5 positions. Tokens generated since
  are preferred to the prompt's, the newest first, in at most half of what is left.
- `h2o` gives half of the budget to the most recent tokens and half to those that received most attention.
- `quest` makes the bounds of different heads comparable by a softmax over the pages. Its last page is read
  in part where the budget ends inside it, from its first position on. Its query is the last confirmed
  token's: the set must be known before the block's own queries are.
- `dustin` takes half of what is left by the draft's look-ahead and half by the target's last token. Draft
  queries and heads are averaged. Where nobody looks ahead all of it goes by the target's last token.

Shape suffixes: N positions of the history, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels import native_kernels
from foretell.registry import Registry
from foretell.sparse.signals import PAGE, Signals

Signal = Literal["history", "lookahead", "window", "received", "pages"]
LEAST_BUDGET = 4  # a sink, a recent token, and something to choose
SINKS = 4
RECENT = 64
OBSERVED = 32  # last queries of the prompt that SnapKV goes by
_POOL = 5


class Policy(Protocol):
    """How the unprotected part of a budget is filled.

    Attributes:
        needs: the signals that `fill` reads.
        about: one line for help texts.
    """

    @property
    def needs(self) -> frozenset[Signal]: ...

    @property
    def about(self) -> str: ...

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """Marks `room` more positions in the bool mask `kept_N`, in which at least so many are unmarked."""
        ...


def protection(budget: int) -> tuple[int, int]:
    """(sinks, window): how many of the first and of the last tokens every set of this budget holds."""
    return min(SINKS, budget // 4), min(RECENT, budget // 4)


def select(policy: Policy, signals: Signals, budget: int) -> Tensor:
    """The positions to read, ascending int64 [min(budget, length)] on the CPU.

    Args:
        budget: at least `LEAST_BUDGET`.
    """
    if signals.length <= budget:
        return torch.arange(signals.length)
    sinks, window = protection(budget)
    kept_N = torch.zeros(signals.length, dtype=torch.bool)
    kept_N[:sinks] = True
    kept_N[signals.length - window :] = True
    policy.fill(signals, kept_N, budget - sinks - window)
    return kept_N.nonzero()[:, 0]


def _mark_best(score_N: Tensor | None, kept_N: Tensor, count: int) -> None:
    """Marks the unmarked positions of highest score."""
    assert score_N is not None, "a signal that the policy needs is missing"
    assert len(score_N) == len(kept_N), "a signal of another history"
    score_N = score_N.cpu()
    if (kernels := native_kernels()) is not None:
        kernels.mark_best(score_N, kept_N, count)
    else:
        kept_N[score_N.masked_fill(kept_N, -torch.inf).topk(count).indices] = True


def _mark_newest(kept_N: Tensor, count: int) -> None:
    """Marks the last unmarked positions."""
    first = max(0, len(kept_N) - count - int(kept_N.sum()))  # so many are behind it, marked ones and all
    unmarked = (~kept_N[first:]).nonzero()[:, 0]
    kept_N[first:][unmarked[max(0, len(unmarked) - count) :]] = True


@dataclass(frozen=True, slots=True)
class Streaming:
    """Sinks and a recent window (StreamingLLM, Xiao et al. 2023), at true positions."""

    needs: ClassVar[frozenset[Signal]] = frozenset()
    about: str = "the first tokens and the most recent ones (StreamingLLM)"

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """See `Policy`."""
        _mark_newest(kept_N, room)


@dataclass(frozen=True, slots=True)
class SnapKV:
    """What the end of the prompt looked at (Li et al. 2024)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"window"})
    about: str = "what the end of the prompt looked at (SnapKV)"

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """See `Policy`."""
        read_N, made_N = kept_N[: signals.prompt], kept_N[signals.prompt :]
        left, generated = (int((~part_N).sum()) for part_N in (read_N, made_N))
        newest = min(generated, max(room // 2, room - left))
        _mark_newest(made_N, newest)
        assert signals.window_N is not None, "a signal that the policy needs is missing"
        pooled_N = F.avg_pool1d(signals.window_N.cpu()[None], _POOL, stride=1, padding=_POOL // 2)[0]
        _mark_best(pooled_N, read_N, room - newest)


@dataclass(frozen=True, slots=True)
class H2O:
    """Heavy hitters: what received most attention so far (Zhang et al. 2023)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"received"})
    about: str = "half recent tokens, half those that received most attention (H2O)"

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """See `Policy`."""
        budget = room + int(kept_N.sum())
        recent = max(0, budget // 2 - protection(budget)[1])
        _mark_newest(kept_N, recent)
        _mark_best(signals.received_N, kept_N, room - recent)


@dataclass(frozen=True, slots=True)
class Quest:
    """Pages whose keys can score highest with the last query (Tang et al. 2024)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"pages"})
    about: str = "pages of 16 whose keys can score highest (Quest)"

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """See `Policy`."""
        assert signals.pages_P is not None, "a signal that the policy needs is missing"
        order_P = signals.pages_P.cpu().argsort(descending=True, stable=True)
        free_N = F.pad(~kept_N, (0, len(order_P) * PAGE - signals.length))
        before_P = free_N.view(-1, PAGE).sum(1)[order_P].cumsum(0)
        whole = int(torch.searchsorted(before_P, room, right=True))  # pages that fit
        rows_PX = torch.zeros(len(order_P), PAGE, dtype=torch.bool)
        rows_PX[order_P[:whole]] = True
        kept_N |= rows_PX.flatten()[: signals.length]
        if whole < len(order_P) and (rest := room - (int(before_P[whole - 1]) if whole else 0)):
            start = int(order_P[whole]) * PAGE
            part_N = kept_N[start : start + PAGE]
            part_N[(~part_N).nonzero()[:rest, 0]] = True


@dataclass(frozen=True, slots=True)
class Dustin:
    """Draft look-ahead first, then the target's last token (Lee et al. 2026).

    Args:
        lookahead: share of the room that goes by the draft; 1 and 0 are the paper's ablations.
    """

    lookahead: float = 0.5
    about: str = "what the draft looks at, then what the target's last token looked at (Dustin)"

    @property
    def needs(self) -> frozenset[Signal]:
        """The last token's attention too where all goes by the draft: there may be none."""
        return frozenset({"history", "lookahead"} if self.lookahead else {"history"})

    def fill(self, signals: Signals, kept_N: Tensor, room: int) -> None:
        """See `Policy`. The second fill sees the first one's positions as taken: the two are disjoint."""
        first = 0 if signals.lookahead_N is None else round(self.lookahead * room)
        if first:
            _mark_best(signals.lookahead_N, kept_N, first)
        if first < room:
            _mark_best(signals.history_N, kept_N, room - first)


def goes_by_profile(policy: Policy) -> bool:
    """Whether a profile changes what the policy selects; published baselines keep their own rules."""
    return isinstance(policy, Dustin)


POLICIES: Registry[Policy] = Registry(
    "kv",
    {
        "streaming": Streaming(),
        "snapkv": SnapKV(),
        "h2o": H2O(),
        "quest": Quest(),
        "dustin": Dustin(),
        "dustin-draft": Dustin(1.0, "the draft's look-ahead alone (ablation of dustin)"),
        "dustin-history": Dustin(0.0, "the target's last token alone (ablation of dustin)"),
    },
)
KV_CHOICES = ("full", *POLICIES)
