"""Ways to run a head agree, for every layout: some rows or all of them, compiled code or torch."""

from __future__ import annotations

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.drafters.feature import HeadRunner
from foretell.errors import InputError
from foretell.heads.base import layer_output
from foretell.models import linear
from foretell.models.rope import RopeTable
from foretell.sampling import Sampler
from foretell.train.resume import load_head
from foretell.types import SamplingParams
from tests import head_files, oracle
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
    folder = make(tmp_path / "head")
    one, loop = (HeadRunner(load_head(kind, folder, target)[0], target, 400, "stored") for _ in range(2))
    assert (one._whole is None) == ("Qwen3-Next" in layout or "DeepSeek" in layout)
    loop._whole = None
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


KINDS = {"eagle": head_files.eagle, "eagle3": lambda folder: head_files.eagle3(folder, "safeailab"),
         "mtp": head_files.mimo, "medusa": lambda folder: head_files.medusa(folder, "v1.0")}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_rounded_weights_change_drafts_and_no_answer(name, target, tmp_path, monkeypatch):
    folder, real, first = KINDS[name](tmp_path / "head"), Sampler.rank, {}
    for weights in ("stored", "int8", "auto"):
        ranked = []

        def rank(sampler, logits_V, *rest, ranked=ranked):
            ranked.append(logits_V.clone())
            return real(sampler, logits_V, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "rank", rank)
            engine = oracle.engine(target, f"{name}:{folder}", options={"weights": weights}, draft_tokens=6)
            (request,) = oracle.run(engine, [[5, 17, 33, 8, 61]], SamplingParams(max_tokens=20))
        assert request.output_ids == oracle.generate(target, [5, 17, 33, 8, 61], request.params)
        first[weights] = ranked[0]
    away = float((first["int8"] - first["stored"]).norm() / first["stored"].norm())
    assert 1e-4 < away < 0.05, away
    assert torch.equal(first["auto"], first["int8"])


def test_weights_of_a_head_that_cannot_be_had_are_refused(target, tmp_path, monkeypatch):
    folder = head_files.eagle(tmp_path / "head")
    with pytest.raises(InputError, match=r"weights of a head must be one of auto, .*int8, got 'int4'"):
        oracle.engine(target, f"eagle:{folder}", options={"weights": "int4"})
    monkeypatch.setattr(linear, "native_kernels", lambda: None)
    oracle.engine(target, f"eagle:{folder}")  # auto keeps what is stored
    with pytest.raises(InputError, match="weights int8 need the compiled kernels"):
        oracle.engine(target, f"eagle:{folder}", options={"weights": "int8"})
