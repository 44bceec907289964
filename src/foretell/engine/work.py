"""One request's part of a step, and what it comes to.

Shape suffixes: R rows whose logits are wanted, V vocabulary, T rows, W hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.attention import Segment
from foretell.drafters import Observed
from foretell.engine.request import Request
from foretell.models.base import ForwardOutput
from foretell.stats import StepStats
from foretell.types import DraftTree, Verdict


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step. `rows` index the step's logits."""

    request: Request
    tree: DraftTree
    segment: Segment
    rows: slice


def emit(part: Work, verdict: Verdict, logits_RV: Tensor, totals: StepStats) -> None:
    """Emits the accepted tokens and the next one, up to where the answer ends."""
    request, before, accepted = part.request, part.request.emitted, 0
    tokens = [*(part.tree.tokens[node] for node in verdict.path), verdict.next_token]
    for index, (token, above) in enumerate(zip(tokens, (-1, *verdict.path), strict=True)):
        drafted = index < len(verdict.path)
        accepted += drafted
        origin = part.tree.origin if drafted else -1
        if reason := request.emit(token, logits_RV[above + 1], origin, index + 1):
            request.finish(reason)
            break
    emitted = request.emitted - before  # negative where a stop string took back earlier tokens
    for stats in (request.stats, totals):
        stats.record(part.tree, max(0, min(accepted, emitted)), emitted)
    if request.stats.steps == 1:
        request.stats.first_emitted = emitted
    request.lossless = request.lossless and verdict.lossless and part.segment.selected is None


def observed(
    part: Work,
    verdict: Verdict | None,
    start: int,
    rows: list[int],
    output: ForwardOutput,
    choices: Sequence[int],
    layers: Sequence[int],
) -> Observed:
    """What the drafter is shown of it: `start` tokens were read before, `rows` of the pass were kept."""
    hidden_TW, states = output.hidden_TW, output.aux_TW
    aux_TW: dict[int, Tensor] = {}
    if hidden_TW is not None or states:
        device = next(iter(states.values())).device if hidden_TW is None else hidden_TW.device
        row_T = torch.tensor(rows, device=device)
        hidden_TW = None if hidden_TW is None else hidden_TW.index_select(0, row_T)
        aux_TW = {layer: states_TW.index_select(0, row_T) for layer, states_TW in states.items()}
    queries = {layer: output.queries[layer].at(rows) for layer in layers}
    return Observed(start, len(rows), part.tree, verdict, hidden_TW, aux_TW, choices, queries)
