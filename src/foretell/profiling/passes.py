"""Passes of a model over a trace, whose queries are kept.

Shape suffixes: R rows, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.attention import Queries, Segment, pack
from foretell.cache import KVArena, Lease
from foretell.models.base import TargetModel
from foretell.sparse import KVReader
from foretell.types import NO_NEEDS, Needs

_CHUNK = 512  # tokens of a prompt that one pass reads


@dataclass(frozen=True, slots=True)
class Passed:
    """A trace that was read whole.

    Args:
        tokens: the prompt, and what follows it.
        prompt: length of the prompt.
        queries: per layer, those of the prompt's last token and of all that follow.
        arena, lease: its keys and values.
    """

    tokens: list[int]
    prompt: int
    queries: Mapping[int, Queries]
    arena: KVArena
    lease: Lease

    def at(self, layer: int, positions: range) -> Queries:
        """The queries of these positions."""
        first = self.prompt - 1
        return self.queries[layer].at(range(positions.start - first, positions.stop - first))


def decode(model: TargetModel, prompt: Sequence[int], count: int, reader: KVReader | None = None) -> Passed:
    """Reads a prompt and goes on greedily for `count` tokens, end tokens or not; all are read.

    Args:
        reader: follows the prompt, as request 0.
    """
    tokens = list(prompt)
    arena = model.new_arena(len(tokens) + count)
    lease = Lease(0, arena.slots, tokens)
    _read(model, arena, lease, len(tokens) - 1, reader)
    every, rows = Needs(queries=tuple(range(model.num_layers))), []
    for step in range(count + 1):
        segment = Segment(0, lease.length, tokens[lease.length :])
        output = model.forward(pack([segment], arena), every | (NO_NEEDS if reader is None else reader.needs))
        rows.append(output.queries)
        lease.length += 1
        if reader is not None and not step:
            reader.observe(0, output.queries, [0], arena, lease)
        if step < count:
            tokens.append(int(output.logits_RV[0].argmax()))
    queries = {
        layer: Queries(torch.cat([row[layer].q_THD for row in rows]), rows[0][layer].spec)
        for layer in every.queries
    }
    return Passed(tokens, len(prompt), queries, arena, lease)


def follow(model: TargetModel, tokens: Sequence[int], prompt: int) -> Passed:
    """Reads a prompt and what another model said after it."""
    arena = model.new_arena(len(tokens))
    lease = Lease(0, arena.slots, list(tokens))
    _read(model, arena, lease, prompt - 1, None)
    every = Needs(queries=tuple(range(model.num_layers)))
    output = model.forward(pack([Segment(0, lease.length, tokens[prompt - 1 :])], arena), every)
    lease.length = len(tokens)
    return Passed(list(tokens), prompt, output.queries, arena, lease)


def few_keys(model: TargetModel, passed: Passed, positions: range, reader: KVReader) -> dict[int, Queries]:
    """The queries of these tokens when they read what the reader selects of what is before them; the keys and
    values of the trace stay as they are."""
    lease, arena = passed.lease, passed.arena
    length, block = lease.length, slice(positions.start, positions.stop)
    kept = [store[:, :, block].clone() for store in (arena.keys_LKSD, arena.values_LKSD)]
    lease.length = positions.start
    selected = reader.select(0, arena, lease)
    segment = Segment(0, positions.start, passed.tokens[block], selected=selected, logits=False)
    every = Needs(queries=tuple(range(model.num_layers)))
    output = model.forward(pack([segment], arena), every)
    lease.length = length
    arena.keys_LKSD[:, :, block], arena.values_LKSD[:, :, block] = kept
    return dict(output.queries)


def _read(model: TargetModel, arena: KVArena, lease: Lease, end: int, reader: KVReader | None) -> None:
    """The first `end` tokens of a prompt."""
    if reader is not None:
        reader.start(0, end + 1)
    needs = NO_NEEDS if reader is None else reader.needs
    while lease.length < end:
        part = lease.tokens[lease.length : min(end, lease.length + _CHUNK)]
        output = model.forward(pack([Segment(0, lease.length, part, logits=False)], arena), needs)
        lease.length += len(part)
        if reader is not None:
            reader.observe(0, output.queries, range(len(part)), arena, lease)
