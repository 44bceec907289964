"""The CUDA path: same tokens as on the CPU up to ties, trees equal to chains. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.models.decoder import load_decoder
from foretell.types import SamplingParams
from tests import head_files, oracle, test_heads, zoo
from tests.test_parity import PROMPT, check_parity, prefill_logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("name", zoo.OWN)
def test_fp32_logits_equal_transformers(name, model_folder):
    model = load_decoder(model_folder(name), torch.float32, torch.device("cuda"))
    reference = zoo.build(name)
    ours = prefill_logits(model, PROMPT).cpu()
    torch.testing.assert_close(ours, zoo.path_logits(reference, PROMPT), atol=1e-3, rtol=1e-3)


def test_bf16_answers_differ_from_plain_only_at_ties(model_folder):
    model = load_decoder(model_folder("llama"), torch.bfloat16, torch.device("cuda"))
    params = SamplingParams(max_tokens=40)
    plain = oracle.run(oracle.engine(model), [PROMPT], params)[0]
    drafted = oracle.run(oracle.engine(model, oracle.draft_model(model, model)), [PROMPT], params)[0]
    for at, (a, b) in enumerate(zip(plain.output_ids, drafted.output_ids, strict=True)):
        if a != b:
            tokens = [*PROMPT, *plain.output_ids[:at]]
            logits = model.forward(pack([Segment(0, 0, tokens)], model.new_arena(len(tokens)))).logits_RV[0]
            assert abs(float(logits[a] - logits[b])) < 0.05, "a difference that is no tie"
            break


def test_tree_equals_paths(model_folder):
    model = load_decoder(model_folder("llama"), torch.float32, torch.device("cuda"))
    check_parity(_OnCpu(model), zoo.build("llama"))


class _OnCpu:
    """Hands logits back on the CPU, for comparison."""

    def __init__(self, model) -> None:
        self._model = model

    def new_arena(self, slots):
        return self._model.new_arena(slots)

    def forward(self, batch):
        from dataclasses import replace

        output = self._model.forward(batch)
        return replace(output, logits_RV=output.logits_RV.cpu())


@pytest.mark.parametrize("layout", ["eagle, bias by default", "eagle3, speculators", "mtp, DeepSeek-V3"])
def test_heads_draft_on_the_device(layout, model_folder, tmp_path):
    """Same drafts as on the CPU: heads, their caches and their trees are the same code."""
    make, drafter, _ = test_heads.LAYOUTS[layout]
    folder, drafted = make(tmp_path / "head"), {}
    for device in ("cpu", "cuda"):
        target = load_decoder(model_folder("llama", **head_files.TARGET), torch.float32, torch.device(device))
        engine = oracle.engine(target, f"{drafter}:{folder}", draft_tokens=9)
        requests = oracle.run(engine, test_heads.PROMPTS, SamplingParams(max_tokens=12))
        drafted[device] = [r.output_ids for r in requests], engine.stats.drafted, engine.stats.accepted
    assert drafted["cpu"] == drafted["cuda"]
