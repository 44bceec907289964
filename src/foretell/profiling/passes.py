"""Passes of a model over a trace, whose queries are kept.

Shape suffixes: N positions of the history, L layers, K key/value heads, S slots, D head size.
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
        queries: per layer, those of the prompt's last token and of all that follow; or none.
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
    queries = _joined(rows)
    return Passed(tokens, len(prompt), queries, arena, lease)


def follow(model: TargetModel, tokens: Sequence[int]) -> Passed:
    """Reads what another model has read; no queries are kept."""
    arena = model.new_arena(len(tokens))
    lease = Lease(0, arena.slots, list(tokens))
    _read(model, arena, lease, len(tokens), None)
    return Passed(list(tokens), len(tokens), {}, arena, lease)


def draft(
    model: TargetModel, passed: Passed, places: range, reader: KVReader | None = None
) -> dict[int, Queries]:
    """The queries of passes that draft greedily behind the token at the first of these places, one pass per
    place; the keys and values of the trace stay as they are.

    Args:
        reader: what they read of the history, as request 0; None = everything.
    """
    lease, arena = passed.lease, passed.arena
    stores, block = (arena.keys_LKSD, arena.values_LKSD), slice(places.start, places.stop)
    kept = [store_LKSD[:, :, block].clone() for store_LKSD in stores]
    length, lease.length = lease.length, places.start
    selected_N = None if reader is None else reader.select(0, arena, lease)
    lease.length = length
    every, token, rows = Needs(queries=tuple(range(model.num_layers))), passed.tokens[places.start], []
    for place in places:
        read_N = selected_N
        if selected_N is not None:
            read_N = torch.cat([selected_N, torch.arange(places.start, place)])
        output = model.forward(pack([Segment(0, place, [token], selected=read_N)], arena), every)
        rows.append(output.queries)
        token = int(output.logits_RV[0].argmax())
    for store_LKSD, part_LKSD in zip(stores, kept, strict=True):
        store_LKSD[:, :, block] = part_LKSD
    return _joined(rows)


def _joined(rows: Sequence[Mapping[int, Queries]]) -> dict[int, Queries]:
    """The queries of several passes, per layer."""
    return {
        layer: Queries(torch.cat([row[layer].q_THD for row in rows]), rows[0][layer].spec)
        for layer in rows[0]
    }


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
