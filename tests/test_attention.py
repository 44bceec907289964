"""`attend` against a float64 oracle, for both kernels: chains, trees, windows, caps, sinks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.attention import Segment, attend, pack
from foretell.cache import KVArena
from foretell.kernels import HeadSpec, TorchKernels, native_kernels
from tests.attention_oracle import attend_reference

CPU = torch.device("cpu")
KERNELS = {"native": native_kernels(), "torch": TorchKernels()}
SPECS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"window": 4, "softcap": 2.0, "sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def check(segments: list[Segment], spec: HeadSpec, kernels, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    arena = KVArena(2, spec.kv_heads, spec.dim, 128, torch.float32, CPU)
    for store in (arena.keys_LKSD, arena.values_LKSD):
        store.normal_(generator=generator)
    past = [
        tuple(s[1][:, seg.start : seg.start + seg.past].clone() for s in (arena.keys_LKSD, arena.values_LKSD))
        for seg in segments
    ]
    rows = sum(segment.rows for segment in segments)
    q = torch.randn(rows, spec.heads, spec.dim, generator=generator)
    k, v = (torch.randn(rows, spec.kv_heads, spec.dim, generator=generator) for _ in range(2))
    batch = pack(segments, arena)
    out = attend(1, q, k, v, batch, spec, kernels).view(rows, spec.heads, spec.dim)
    row = 0
    for segment, before in zip(segments, past, strict=True):
        part = slice(row, row + segment.rows)
        wanted = attend_reference(q[part], before, (k[part], v[part]), segment, spec)
        torch.testing.assert_close(out[part].double(), wanted, atol=1e-5, rtol=1e-5)
        slots = slice(segment.start + segment.past, segment.start + segment.past + segment.rows)
        assert torch.equal(arena.keys_LKSD[1, :, slots], k[part].transpose(0, 1)), "K is not in its slots"
        row += segment.rows


@st.composite
def segments(draw):
    """Up to three requests with random pasts, read in whole or in part, pending chains and random trees."""
    out, start = [], 0
    for _ in range(draw(st.integers(1, 3))):
        past, pending = draw(st.integers(0, 12)), draw(st.integers(1, 6))
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 7)))]
        kept = draw(st.none() | st.sets(st.integers(0, past - 1))) if past else None
        selected = None if kept is None else torch.tensor(sorted(kept), dtype=torch.int64)
        out.append(Segment(start, past, [0] * pending, [0] * len(parents), parents, selected=selected))
        start += 32
    return out


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(batch=segments(), seed=st.integers(0, 1000))
def test_attend_equals_oracle(kind, name, batch, seed):
    check(batch, HeadSpec(4, 2, 8, 0.4, **SPECS[kind]), KERNELS[name], seed)


def test_tree_mask_by_hand():
    """What each row may see, written out: two committed slots, two pending rows, a tree of four."""
    arena = KVArena(1, 1, 8, 16, torch.float32, CPU)
    batch = pack([Segment(3, 2, [0, 0], [0, 0, 0, 0], [-1, -1, 0, 1])], arena)
    ((slots, mask),) = batch.seen(None).masks
    assert slots == slice(3, 11)
    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1, 0, 1],
    ]
    assert batch.position_T.tolist() == [2, 3, 4, 4, 5, 5]
    assert batch.logit_R.tolist() == [1, 2, 3, 4, 5]


def test_a_tree_may_grow_over_several_passes():
    """Rows of a later pass see their ancestors of earlier ones: the same bits as all at once."""
    torch.manual_seed(0)
    spec, kernels = HeadSpec(4, 2, 8, 0.4), KERNELS["native"]
    tokens, parents = [0] * 6, [-1, -1, 0, 1, 2, 3]
    q, k, v = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)

    def arena() -> KVArena:
        made = KVArena(1, 2, 8, 32, torch.float32, CPU)
        for store in (made.keys_LKSD, made.values_LKSD):
            store.normal_(generator=torch.Generator().manual_seed(1))
        return made

    whole = attend(0, q, k, v, pack([Segment(2, 3, [0, 0], tokens, parents)], arena()), spec, kernels)
    grown, part = arena(), []
    for rows, segment in (
        ([0, 1, 2, 3], Segment(2, 3, [0, 0], tokens[:2], parents[:2])),
        ([4, 5], Segment(2, 5, [], tokens[:4], parents[:4], stored=2)),
        ([6, 7], Segment(2, 5, [], tokens, parents, stored=4)),
    ):
        batch = pack([segment], grown)
        part.append(attend(0, q[rows], k[rows], v[rows], batch, spec, kernels))
    assert torch.equal(torch.cat(part), whole)
    assert batch.position_T.tolist() == [7, 7]
    assert batch.logit_R.tolist() == [0, 1]


def test_long_prefill_equals_sdpa():
    torch.manual_seed(0)
    spec = HeadSpec(4, 2, 16, 0.25)
    arena = KVArena(1, 2, 16, 700, torch.float32, CPU)
    q, k, v = torch.randn(600, 4, 16), torch.randn(600, 2, 16), torch.randn(600, 2, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    )[0].transpose(0, 1)
    for kernels in KERNELS.values():
        out = attend(0, q, k, v, pack([Segment(0, 0, [0] * 600)], arena), spec, kernels)
        torch.testing.assert_close(out.view_as(q), wanted, atol=1e-5, rtol=1e-5)
