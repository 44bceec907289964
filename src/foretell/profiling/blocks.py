"""What a block under verification needs of its history, and what every layer would have told before.

ARR, the attention recovery rate of a selection, is the true attention probability that the verification pass
reads: mean over the block's queries, and the target's retrieval heads by their scores, of the mass on the
selection and on the block itself. Most heads look at separators and neighbours, which any selection holds: a
mean over all of them does not see whether what is asked for is read. ARR is linear in the selection, so one
vector per block serves every selection.

A block is a token that waits and the four that the target says after it. What drafted there was the draft
itself, rightly or not: its queries are those of its own tokens.

Shape suffixes: L layers, N positions of the history, R queries, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.attention import Queries
from foretell.profiling.passes import Passed
from foretell.sparse import Heads, attention_mass, draft_mass, spread_layers

BLOCK = 5


@dataclass(frozen=True, slots=True)
class Block:
    """Signals before one verification.

    Args:
        prompt: tokens of the prompt.
        true_N: what the block's queries pay to each position.
        own: what they pay to the block.
        history_LN: by the last confirmed token, per target layer, mean over its retrieval heads.
        lookahead_LN: by the draft's queries, per draft layer, mean over them and its retrieval heads.
        default_N, default_ahead_N: both as they are without a profile.
    """

    prompt: int
    true_N: Tensor
    own: float
    history_LN: Tensor
    lookahead_LN: Tensor
    default_N: Tensor
    default_ahead_N: Tensor


@dataclass(frozen=True, slots=True)
class Looker:
    """The draft of a block: its queries, and where its keys lie."""

    queries: Mapping[int, Queries]
    passed: Passed

    def signals(self, heads: Sequence[Heads], length: int) -> tuple[Tensor, Tensor]:
        """Attention per layer by these heads [L, N]; and without a profile [N]."""
        layers = [self._mass([one], length) for one in heads]
        return torch.stack(layers), self._mass(spread_layers(len(heads)), length)

    def _mass(self, watched: Sequence[Heads], length: int) -> Tensor:
        found = draft_mass([self.queries], watched, self.passed.arena, self.passed.lease.start, length)
        assert found is not None
        return found


def places(passed: Passed) -> Iterator[range]:
    """The positions of every block of a trace."""
    for start in range(passed.prompt, len(passed.tokens) - BLOCK + 1, BLOCK):
        yield range(start, start + BLOCK)


def drafted(place: range) -> range:
    """The places at which passes propose the rest of a block."""
    return range(place.start, place.stop - 1)


def block(
    target: Passed,
    place: range,
    heads: Sequence[Heads],
    weight_LH: Tensor,
    draft: Looker,
    draft_heads: Sequence[Heads],
) -> Block:
    """The signals of one block; attention is computed layer by layer.

    Args:
        weight_LH: what each head of the target counts in the truth, in all 1.
    """
    length = place.start
    true_M = torch.zeros(place.stop)
    history = []
    for chosen in heads:
        queries = target.at(chosen.layer, place)
        keys_KND = target.arena.layer(chosen.layer)[0][:, : place.stop]
        spec = queries.spec
        mass_RHM = attention_mass(queries.q_THD, keys_KND, spec, range(spec.heads), list(place))
        true_M += weight_LH[chosen.layer].cpu() @ mass_RHM.mean(0).cpu()
        history.append(_last(target, chosen, length))
    ahead_LN, default_ahead_N = draft.signals(draft_heads, length)
    return Block(
        prompt=target.prompt,
        true_N=true_M[:length],
        own=float(true_M[length:].sum()),
        history_LN=torch.stack(history).cpu(),
        lookahead_LN=ahead_LN.cpu(),
        default_N=_last(target, Heads(len(heads) // 2), length).cpu(),
        default_ahead_N=default_ahead_N.cpu(),
    )


def _last(target: Passed, chosen: Heads, length: int) -> Tensor:
    """What the last confirmed token pays to its history [N], by these heads."""
    looks = [{chosen.layer: target.at(chosen.layer, range(length - 1, length))}]
    found_N = draft_mass(looks, [chosen], target.arena, target.lease.start, length)
    assert found_N is not None
    return found_N
