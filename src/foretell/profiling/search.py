"""The greedy search of Dustin's Algorithm 1 over blocks of recorded signals: pure functions.

First the target layer that alone recovers most, then draft layers one by one as long as each adds something,
then the look-ahead's share for every budget, on a plain grid: it has one dimension and its values are cheap,
so there is nothing for Bayesian optimisation to save.

Shape suffixes: N positions of the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.profiling.blocks import Block
from foretell.sparse import POLICIES, Signals, select
from foretell.sparse.policies import Dustin, Policy

MOST_LAYERS = 4
LEAST_GAIN = 0.001  # of ARR, that another draft layer must bring
SHARES = tuple(i / 10 for i in range(11))
_FIRST_SHARE = 0.5  # until the share itself is searched

Signal = Callable[[Block], Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome, with the curves that led to it: mean ARR over the blocks.

    Args:
        target_layer, draft_layers, lookahead: see `Profile`.
        by_target_layer: by each layer's history alone.
        by_draft_layers: (layer that was added, ARR with it), the one that was refused last.
        by_share: budget -> share -> ARR.
    """

    target_layer: int
    draft_layers: tuple[int, ...]
    lookahead: dict[int, float]
    by_target_layer: list[float]
    by_draft_layers: list[tuple[int, float]]
    by_share: dict[int, dict[float, float]]

    def curves(self) -> dict[str, Any]:
        """As JSON, rounded."""
        return {
            "target_layer": [round(x, 4) for x in self.by_target_layer],
            "draft_layers": [[layer, round(x, 4)] for layer, x in self.by_draft_layers],
            "lookahead": {
                str(budget): {f"{share:g}": round(x, 4) for share, x in curve.items()}
                for budget, curve in self.by_share.items()
            },
        }


def recovery(
    blocks: Sequence[Block], policy: Policy, budget: int, history: Signal, lookahead: Signal | None = None
) -> float:
    """Mean ARR of what the policy selects by these signals."""
    total = 0.0
    for block in blocks:
        signals = Signals(
            len(block.true_N),
            block.prompt,
            history_N=history(block),
            lookahead_N=None if lookahead is None else lookahead(block),
        )
        total += float(block.true_N[select(policy, signals, budget)].sum()) + block.own
    return total / len(blocks)


def search(blocks: Sequence[Block], budgets: Sequence[int], on_step: Callable[[], None]) -> Found:
    """The search; layers are chosen at the middle budget."""
    middle = sorted(budgets)[len(budgets) // 2]
    by_target_layer = []
    for layer in range(len(blocks[0].history_LN)):
        by_target_layer.append(recovery(blocks, Dustin(0.0), middle, _history(layer)))
        on_step()
    target = max(range(len(by_target_layer)), key=by_target_layer.__getitem__)
    layers: list[int] = []
    by_draft_layers: list[tuple[int, float]] = []
    best = -1.0
    while len(layers) < min(MOST_LAYERS, len(blocks[0].lookahead_LN)):
        scores = {}
        for layer in range(len(blocks[0].lookahead_LN)):
            if layer not in layers:
                ahead = _ahead([*layers, layer])
                scores[layer] = recovery(blocks, Dustin(_FIRST_SHARE), middle, _history(target), ahead)
        on_step()
        layer = max(scores, key=scores.__getitem__)
        by_draft_layers.append((layer, scores[layer]))
        if scores[layer] < best + LEAST_GAIN:
            break
        layers.append(layer)
        best = scores[layer]
    signals, by_share = (_history(target), _ahead(layers)), {}
    for budget in budgets:
        by_share[budget] = {s: recovery(blocks, Dustin(s), budget, *signals) for s in SHARES}
        on_step()
    lookahead = {budget: max(curve, key=curve.__getitem__) for budget, curve in by_share.items()}
    return Found(target, tuple(layers), lookahead, by_target_layer, by_draft_layers, by_share)


def references(blocks: Sequence[Block], budgets: Sequence[int], found: Found) -> dict[int, dict[str, float]]:
    """Budget -> mean ARR of what was found, of what there is without it, and of the bounds."""
    history, ahead = _history(found.target_layer), _ahead(found.draft_layers)
    chance = torch.Generator().manual_seed(0)
    out = {}
    for budget in budgets:
        rows: dict[str, tuple[Policy, Signal, Signal | None]] = {
            "profile": (Dustin(found.lookahead[budget]), history, ahead),
            "draft only": (Dustin(1.0), history, ahead),
            "history only": (Dustin(0.0), history, None),
            "default": (Dustin(0.5), lambda b: b.default_N, lambda b: b.default_ahead_N),
            "default draft only": (Dustin(1.0), lambda b: b.default_N, lambda b: b.default_ahead_N),
            "default history only": (Dustin(0.0), lambda b: b.default_N, None),
            "streaming": (POLICIES["streaming"], lambda b: b.default_N, None),
            "random": (Dustin(0.0), lambda b: torch.rand(len(b.true_N), generator=chance), None),
            "oracle": (Dustin(0.0), lambda b: b.true_N, None),
        }
        out[budget] = {
            name: recovery(blocks, policy, budget, signal, lookahead)
            for name, (policy, signal, lookahead) in rows.items()
        }
    return out


def steps(layers: int, budgets: Sequence[int]) -> int:
    """How often `search` calls `on_step`, at most."""
    return layers + MOST_LAYERS + len(budgets)


def _history(layer: int) -> Signal:
    return lambda block: block.history_LN[layer]


def _ahead(layers: Sequence[int]) -> Signal:
    chosen = list(layers)
    return lambda block: block.lookahead_LN[chosen].mean(0)
