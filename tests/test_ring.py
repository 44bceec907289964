"""Sharded attention against one process in float64: every layout, every variant, one to four ranks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.attention import Segment, pack
from foretell.cache import KVArena
from foretell.errors import InputError
from foretell.kernels import HeadSpec, TorchKernels, native_kernels
from foretell.parallel.choose import Link, Work, choose, prefers_kv, seconds
from foretell.parallel.layout import LAYOUTS, Placement, join, split
from foretell.parallel.merge import merge
from foretell.parallel.ring import VARIANTS, Attention, Sharing, replicated
from foretell.parallel.visible import Range
from tests.attention_oracle import attend_reference
from tests.ranks import on_ranks

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SPECS = {
    "grouped": HeadSpec(4, 2, 8, 0.4),
    "one head each": HeadSpec(4, 4, 16, 0.3),
    "all rules": HeadSpec(4, 1, 8, 0.4, window=6, softcap=2.0, sinks_H=SINKS),
}
TREE = [0, 0, 0, 0, 0], [-1, -1, 0, 0, 2]
# per case, (committed tokens, pending tokens, tree, places of the history that are read)
CASES = {
    "prompt": [(0, 37, ([], []), None)],
    "shorter than the ranks": [(0, 2, ([], []), None)],
    "one token": [(0, 1, ([], []), None)],
    "chunk behind a prefix": [(23, 14, ([], []), None)],
    "unequal batch": [(0, 19, ([], []), None), (31, 1, TREE, None), (0, 3, ([], []), None)],
    "tree": [(17, 2, TREE, None)],
    "selection": [(21, 1, TREE, [0, 1, 5, 13, 14, 20]), (9, 4, ([], []), None)],
}


# (spec, kernels) -> cases
TRIED = {
    ("grouped", "native"): list(CASES),
    ("grouped", "torch"): ["shorter than the ranks", "unequal batch", "selection"],
    ("one head each", "native"): ["prompt"],
    ("all rules", "native"): ["unequal batch", "selection"],
    ("all rules", "torch"): ["unequal batch"],
}


def segments_of(case: str) -> list[Segment]:
    found, start = [], 0
    for past, pending, (draft, parents), read in CASES[case]:
        selected = None if read is None else torch.tensor(read)
        found.append(Segment(start, past, [0] * pending, draft, parents, selected=selected))
        start += past + pending + len(draft)
    return found


def tensors(segments: list[Segment], spec: HeadSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the rows, and keys and values of all slots: the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    rows, slots = sum(s.rows for s in segments), sum(s.past + s.rows for s in segments)
    q_THD = torch.randn(rows, spec.heads, spec.dim, generator=generator)
    return q_THD, torch.randn(2, spec.kv_heads, slots, spec.dim, generator=generator)


def sharing_of(segments, layout: str, ranks: int, window: int | None, *, whole: bool) -> Sharing:
    """Rows go where their keys are; or, `whole`, all of them everywhere."""
    spec = SPECS["grouped"]
    seen = pack(segments, KVArena(1, spec.kv_heads, 8, 256, torch.float32, torch.device("cpu"))).seen(window)
    placements = [Placement(ranks, layout, s.past + len(s.pending)) for s in segments]
    rows, ranges, tokens = [], [], []
    for rank in range(ranks):
        own, places, origin = [], [], 0
        for (row, count), segment, placement in zip(seen.segments, segments, placements, strict=True):
            block = torch.arange(segment.past, segment.past + count)
            mine = placement.owner(block) == rank
            own.append(torch.arange(row, row + count) if whole else torch.arange(row, row + count)[mine])
            places.append(Range(placement, 0, origin))
            origin += placement.count(rank, segment.past + count)
        rows.append(torch.cat(own))
        ranges.append(places)
        tokens.append(origin)
    return Sharing(seen, rows, ranges, tokens)


def block_of(segments, kv_2KND, sharing: Sharing, rank: int) -> torch.Tensor:
    held = [
        s.start + place.placement.held(rank, s.past + s.rows)
        for s, place in zip(segments, sharing.ranges[rank], strict=True)
    ]
    return kv_2KND[:, :, torch.cat(held)].contiguous()


def all_cases(group):
    """Every case on this rank: what it computed, by (spec, kernels, case, layout, variant), and the bytes it
    sent."""
    found = {}
    for (name, kernels_name), cases in TRIED.items():
        spec, kernels = SPECS[name], native_kernels() if kernels_name == "native" else TorchKernels()
        for case, layout in itertools.product(cases, LAYOUTS):
            segments = segments_of(case)
            q_THD, kv_2KND = tensors(segments, spec)
            for variant in (*VARIANTS, "replicated"):
                whole = variant == "replicated"
                sharing = sharing_of(segments, layout, group.size, spec.window, whole=whole)
                attention = Attention(sharing, group, kernels, spec)
                block = block_of(segments, kv_2KND, sharing, group.rank)
                rows = sharing.rows[group.rank]
                run = replicated if whole else VARIANTS[variant]
                group.sent.clear()
                out, lse = run(attention, q_THD[rows], block)
                key = name, kernels_name, case, layout, variant
                found[key] = rows, out, lse, dict(group.sent), sharing.tokens
    return found


@functools.cache
def reference(name: str, case: str) -> torch.Tensor:
    segments, spec = segments_of(case), SPECS[name]
    q_THD, kv_2KND = tensors(segments, spec)
    outs, row = [], 0
    for s in segments:
        part = slice(row, row + s.rows)
        past = tuple(x[:, s.start : s.start + s.past] for x in kv_2KND)
        new = tuple(x[:, s.start + s.past : s.start + s.past + s.rows].transpose(0, 1) for x in kv_2KND)
        outs.append(attend_reference(q_THD[part], past, new, s, spec))
        row += s.rows
    return torch.cat(outs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_layout_and_variant_equals_one_process(ranks):
    results = on_ranks(ranks, all_cases)
    for key in results[0]:
        name, _, case, _, variant = key
        wanted = reference(name, case)
        done = torch.zeros(len(wanted), dtype=torch.int64)
        for rank, result in enumerate(results):
            rows, out, lse, sent, tokens = result[key]
            assert torch.isfinite(out).all(), key
            torch.testing.assert_close(out.double(), wanted[rows], atol=1e-5, rtol=1e-5, msg=str(key))
            done[rows] += 1
            if variant != "replicated":
                ring = result[*key[:-1], "pass-kv"]
                assert torch.equal(out, ring[1]), f"{key}: the variants differ in bits"
                assert torch.equal(lse, ring[2])
            if variant in ("pass-kv", "all-gather"):
                others = [(rank - step) % ranks for step in range(ranks - 1)]
                passed = [rank] * (ranks - 1) if variant == "all-gather" else others
                per_token = 2 * SPECS[name].kv_heads * SPECS[name].dim * 4
                assert sent.get(variant, 0) == per_token * sum(tokens[i] for i in passed), key
        assert (done == (ranks if variant == "replicated" else 1)).all(), "a row was lost, or computed twice"


@settings(deadline=None)
@given(
    ranks=st.integers(1, 7),
    layout=st.sampled_from(LAYOUTS),
    length=st.integers(0, 40),
    more=st.integers(0, 30),
)
def test_placements_are_partitions_that_stay_even(ranks, layout, length, more):
    placement, end = Placement(ranks, layout, length), length + more
    place = torch.arange(end)
    owner, held = placement.owner(place), [placement.held(rank, end) for rank in range(ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(end))
    for rank in range(ranks):
        assert placement.count(rank, end) == len(held[rank])
        own = place[owner == rank]
        assert torch.equal(placement.below(rank, own), torch.arange(len(own)))
    counts = [len(part) for part in held]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(ranks=st.integers(1, 6), layout=st.sampled_from(LAYOUTS), length=st.integers(0, 50))
def test_split_and_join_lose_nothing(ranks, layout, length):
    x = torch.randn(3, length)
    placement = Placement(ranks, layout, length)
    parts = split(x, placement, dim=1)
    assert torch.equal(join(parts, placement, dim=1), x)
    positions = split(torch.arange(length), placement)
    assert all(torch.equal(part, x[:, at]) for part, at in zip(parts, positions, strict=True))


def test_a_layout_by_hand():
    zigzag = Placement(2, "zigzag", 8)
    assert [zigzag.held(rank, 8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert Placement(2, "striped").held(1, 7).tolist() == [1, 3, 5]
    assert Placement(3, "contiguous", 7).held(0, 7).tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="layout 'diagonal'"):
        Placement(2, "diagonal")
    with pytest.raises(InputError, match="ranks must be at least 1, got 0"):
        Placement(0)


def test_zigzag_is_balanced_and_contiguous_is_not():
    """Score cells per rank: half of the square for each with zigzag; with contiguous shards the last rank has
    nearly twice the mean."""
    for ranks in (2, 4):
        segments = [Segment(0, 0, [0] * (16 * ranks))]
        cells = {}
        for layout in LAYOUTS:
            sharing = sharing_of(segments, layout, ranks, None, whole=False)
            cells[layout] = [sum(sharing.cells(a, b) for b in range(ranks)) for a in range(ranks)]
        length = 16 * ranks
        assert all(sum(own) == length * (length + 1) // 2 for own in cells.values())
        assert max(cells["zigzag"]) == min(cells["zigzag"])
        assert max(cells["striped"]) - min(cells["striped"]) == 16 * (ranks - 1)
        mean = length * (length + 1) / 2 / ranks
        assert 2 - 1 / ranks - 0.05 < max(cells["contiguous"]) / mean < 2


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 10_000))
def test_merge_is_exact_and_knows_empty_rows(parts, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, 3, 4 * parts, generator=generator).double() * 8
    values = torch.randn(5, 3, 4 * parts, 6, generator=generator).double()
    hidden = torch.rand(5, 3, 4 * parts, generator=generator) < 0.7
    hidden[0] = True
    scores = scores.masked_fill(hidden, -torch.inf)
    pieces = []
    for s, v in zip(scores.split(4, -1), values.split(4, -2), strict=True):
        lse = s.logsumexp(-1)
        weight = (s - lse.clamp(min=-1e30)[..., None]).exp()
        pieces.append(((weight[..., None] * v).sum(-2).float(), lse.float()))
    out, lse = merge(pieces)
    whole = scores.logsumexp(-1)
    torch.testing.assert_close(lse.double(), whole, atol=1e-5, rtol=1e-5)
    weight = (scores - whole.clamp(min=-1e30)[..., None]).exp()
    torch.testing.assert_close(out.double(), (weight[..., None] * values).sum(-2), atol=1e-5, rtol=1e-5)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("kernels", [native_kernels(), TorchKernels()], ids=["native", "torch"])
def test_a_row_without_keys_gives_nothing_and_lse_is_natural(kernels):
    spec, segments = HeadSpec(2, 1, 8, 0.5), [Segment(0, 3, [0, 0])]
    q_THD, kv_2KND = tensors(segments, spec)
    sharing = sharing_of(segments, "contiguous", 5, None, whole=False)
    rows = torch.arange(2)
    alone = Sharing(sharing.seen, [rows] * 5, sharing.ranges, sharing.tokens)
    out, lse = kernels.partial(q_THD, tuple(kv_2KND[:, :, 4:]), alone.part(0, 4), spec)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    scores = (q_THD[1] * kv_2KND[0, 0, 4]).sum(-1) * 0.5
    torch.testing.assert_close(lse[1], scores, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out[1], kv_2KND[1, 0, 4].expand(2, -1), atol=1e-6, rtol=1e-6)


def test_metas_rule():
    """12.5 % of new tokens for 8 key/value heads under 128; and enough new tokens hide any transfer."""
    link = Link(1e15, 1e9, 0)  # a slow link: nothing is hidden
    for new, wanted in ((124, False), (125, True)):
        assert prefers_kv(Work(4, new, 1000 - new, 128, 8, 128, 2), link) is wanted
    # at least N C Hkv e / (2 Hq BW) = 4 * 8e14 * 8 * 2 / (2 * 128 * 5e10) = 4000 new tokens
    fast = Link(8e14, 5e10, 0)
    assert prefers_kv(Work(4, 4000, 10**6, 128, 8, 128, 2), fast)
    assert not prefers_kv(Work(4, 3999, 10**6, 128, 8, 128, 2), fast)
    assert not prefers_kv(Work(4, 0, 10, 8, 8, 64, 2), fast)


def test_the_cost_model_chooses_each_variant_where_it_is_best():
    slow = Link(2e10, 5e8, 1.4e-3)
    assert choose(Work(4, 16, 4000, 9, 3, 64, 4), slow) == "pass-q"
    assert choose(Work(4, 64, 0, 9, 3, 64, 4), slow) == "all-gather"  # messages are small: one latency
    # few operations per step: a gather exposes everything, a ring hides each block under the one before
    assert choose(Work(8, 32768, 0, 32, 8, 128, 2), Link(3e14, 5e10, 1e-5)) == "pass-kv"
    work = Work(1, 100, 0, 4, 4, 8, 4)
    assert seconds("pass-kv", work, slow) == seconds("pass-q", work, slow) == work.flops / slow.flops
