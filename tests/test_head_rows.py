"""A head of which only some rows are wanted says of them what it says in a whole pass, for every layout."""

from __future__ import annotations

import pytest
import torch

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
        whole_TW = head.step(embed_TW, feature_TW, angles, seen_from(torch.arange(ROWS)))
        some_RW = head.step(embed_TW, feature_TW, angles, seen_from(WANTED), WANTED)
    torch.testing.assert_close(some_RW, whole_TW[WANTED], atol=1e-5, rtol=1e-5)
    assert float((whole_TW[1] - whole_TW[4]).abs().max()) > 1e-3
