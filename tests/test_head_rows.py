"""Ways to run a head agree, for every layout: some rows or all of them, compiled code or torch."""

from __future__ import annotations

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.drafters.feature import HeadRunner
from foretell.heads.base import layer_output
from foretell.heads.ready import make_ready
from foretell.models.rope import RopeTable
from foretell.train.resume import load_head
from tests import head_files
from tests.test_heads import LAYOUTS

ROWS, WANTED = 7, torch.tensor([1, 4, 6])


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wanted_rows_are_those_of_the_whole_pass(layout, target, tmp_path):
    make, kind, _ = LAYOUTS[layout]
    head, _ = load_head(kind, make(tmp_path / "head"), target)
    chance = torch.Generator().manual_seed(1)
    embed_TW, feature_TW = (torch.randn(ROWS, target.hidden_size, generator=chance) for _ in range(2))
    angles = tuple(part[:ROWS] for part in RopeTable(head.rope, head.rotated, target.device).upto(ROWS))

    def seen_from(row_R):
        def attend(q_RHD, k_TKD, v_TKD):
            assert (len(q_RHD), len(k_TKD)) == (len(row_R), ROWS)
            group = q_RHD.shape[1] // k_TKD.shape[1]
            scores = torch.einsum("rhd,thd->hrt", q_RHD, k_TKD.repeat_interleave(group, 1)) * head.scale
            hidden_RT = torch.arange(ROWS) > row_R[:, None]
            weights = scores.masked_fill(hidden_RT, -torch.inf).softmax(-1)
            return torch.einsum("hrt,thd->rhd", weights, v_TKD.repeat_interleave(group, 1)).flatten(1)

        return attend

    with torch.no_grad():
        whole_TW = layer_output(head, embed_TW, feature_TW, angles, seen_from(torch.arange(ROWS)))
        some_RW = layer_output(head, embed_TW, feature_TW, angles, seen_from(WANTED), WANTED)
    torch.testing.assert_close(some_RW, whole_TW[WANTED], atol=1e-5, rtol=1e-5)
    assert float((whole_TW[1] - whole_TW[4]).abs().max()) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_in_one_call_equals_its_operations(layout, target, tmp_path):
    """Compiled code runs every layer without gates, latent attention or experts; a prompt, then a tree that
    grows over two passes beside another request."""
    make, kind, _ = LAYOUTS[layout]
    by_torch, _ = load_head(kind, make(tmp_path / "head"), target)
    head, _ = load_head(kind, tmp_path / "head", target)
    loop = HeadRunner(by_torch.eval(), target, 400)
    one = HeadRunner(make_ready(head, target.device, target.dtype), target, 400)
    assert (one._whole is None) == ("Qwen3-Next" in layout or "DeepSeek" in layout)
    assert loop._whole is None
    prompt, chance = [(7 * i) % 90 + 3 for i in range(150)], torch.Generator().manual_seed(2)
    passes = (
        [Segment(0, 0, prompt), Segment(200, 0, [5, 6])],
        [Segment(0, 150, (), [11, 12], [-1, -1]), Segment(200, 2, [8])],
        [Segment(0, 150, (), [11, 12, 13, 14], [-1, -1, 0, 1], stored=2)],
    )
    for segments in passes:
        feature_TW = torch.randn(sum(s.rows for s in segments), target.hidden_size, generator=chance)
        kept_TW = feature_TW.clone()
        made, wanted = (runner.forward(pack(segments, runner.arena), feature_TW) for runner in (one, loop))
        for part, expected in zip(made, wanted, strict=True):
            torch.testing.assert_close(part, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(feature_TW, kept_TW), "what the target has said stays"
    torch.testing.assert_close(one.arena.keys_LKSD, loop.arena.keys_LKSD, atol=2e-4, rtol=2e-4)
