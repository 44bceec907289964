"""SmolLM2-135M-Instruct: logits equal to transformers', answers equal with and without speculation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell.api import LLM
from foretell.attention import Segment, pack
from foretell.bench.identity import check_identity
from foretell.bench.items import conversations
from foretell.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from foretell.drafters.translate import SameVocabulary
from foretell.types import SamplingParams
from tests import zoo

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]


@pytest.fixture(scope="module")
def plain():
    return LLM("smollm2-135m", drafter="none")


@pytest.fixture(scope="module")
def reference(plain):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain.loaded.folder, dtype=torch.float32).eval()


def test_logits_equal_transformers_in_prefill_and_tree(plain, reference):
    model = plain.loaded.model
    prompt = plain.encode([{"role": "user", "content": "Name three rivers of Europe."}])
    arena = model.new_arena(128)
    chain = list(range(-1, len(prompt) - 2))
    logits = model.forward(pack([Segment(0, 0, prompt[:1], prompt[1:], chain)], arena)).logits_RV
    torch.testing.assert_close(logits, zoo.path_logits(reference, prompt), atol=1e-4, rtol=1e-4)
    tokens, parents = [504, 260, 1343, 28, 30], [-1, -1, 0, 0, 2]
    tree = model.forward(pack([Segment(0, len(prompt), [11], tokens, parents)], arena)).logits_RV
    paths = [[], [504], [260], [504, 1343], [504, 28], [504, 1343, 30]]
    wanted = torch.stack([zoo.path_logits(reference, [*prompt, 11, *path])[-1] for path in paths])
    torch.testing.assert_close(tree, wanted, atol=1e-4, rtol=1e-4)


def test_rows_are_the_same_bits_alone_and_together(plain):
    """Why speculation changes nothing: not close logits, the same ones."""
    model = plain.loaded.model
    assert model.row_exact
    ids = plain.tokenizer.encode("The quick brown fox jumps over the lazy dog and runs into the forest.")
    arena = model.new_arena(64)
    alone = [model.forward(pack([Segment(0, i, [token])], arena)).logits_RV[0] for i, token in enumerate(ids)]
    together = model.forward(
        pack([Segment(0, 0, ids[:1], ids[1:], range(-1, len(ids) - 2))], arena)
    ).logits_RV
    assert torch.equal(together, torch.stack(alone))


def test_hf_adapter_runs_it_too_with_the_same_logits(plain):
    from foretell.models.hf import load_hf

    model = load_hf(plain.loaded.folder, torch.float32, torch.device("cpu"))
    ids = plain.tokenizer.encode("Water boils at")
    batch = [Segment(0, 0, ids)]
    ours = plain.loaded.model.forward(pack(batch, plain.loaded.model.new_arena(16))).logits_RV
    theirs = model.forward(pack(batch, model.new_arena(16))).logits_RV
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def random_draft(plain, tmp_path_factory):
    from foretell.models.decoder import load_decoder

    folder = zoo.save_random(
        "llama", tmp_path_factory.mktemp("draft"), vocab_size=49152, max_position_embeddings=2048
    )
    return load_decoder(folder, torch.float32, torch.device("cpu"))


def test_twenty_prompts_are_token_identical(plain, random_draft):
    """Two per task and turn type, of long ones the end; greedy and temperature 0.8; ngram and a draft model;
    batch 1 and 4 with prefix hits. `foretell bench identity` runs the same check for whole prompts, longer
    answers and real drafts."""
    items = [replace(i, ids=i.ids[-96:]) for i in conversations("identity", plain, max_tokens=12)]
    assert len(items) == 20
    same = SameVocabulary(49152, 49152, 49152)
    drafter = DraftModelDrafter(random_draft, same, 16384, DraftModelOptions(width=2))
    drafted = LLM(plain.loaded, drafter=drafter, draft_tokens=3)
    methods = {"ngram": LLM(plain.loaded, drafter="ngram"), "draft": drafted}
    checks = check_identity(plain, methods, items, lambda: None)
    assert [check.differences for check in checks] == [()] * 8
    assert all(check.reused for check in checks if check.batch == 4), (
        "batches should have met cached prefixes"
    )
    assert any(check.al > 1.5 for check in checks)


def test_other_drafters_and_weights_are_token_identical(plain):
    """Lookahead's wide trees, the planner's cuts, and 8-bit weights against their own plain decoding."""
    items = conversations("identity", plain, max_tokens=16)[::7]
    methods = {
        "auto": LLM(plain.loaded),
        "lookahead": LLM(plain.loaded, drafter="lookahead", draft_tokens=20),
    }
    checks = check_identity(plain, methods, items, lambda: None)
    assert [check.differences for check in checks] == [()] * 8
    rounded = LLM("smollm2-135m", drafter="none", weights="int8")
    methods = {"suffix": LLM(rounded.loaded, drafter="suffix", draft_tokens=8)}
    checks = check_identity(rounded, methods, items, lambda: None)
    assert [check.differences for check in checks] == [()] * 4
    assert any(check.al > 1 for check in checks)


def test_stream_equals_generate_and_chat_reuses_the_conversation(plain):
    llm = LLM(plain.loaded, drafter="ngram")
    messages = [{"role": "user", "content": "Say hello in French, German and Italian. 🙂"}]
    params = SamplingParams(max_tokens=40, stop="Italian:")
    (whole,) = llm.generate(messages, params)
    stream = llm.stream(messages, params)
    chunks, last = list(stream), stream.completion
    assert "".join(chunk.text for chunk in chunks) == last.text == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == last.token_ids == whole.token_ids
    messages += [{"role": "assistant", "content": whole.text}, {"role": "user", "content": "And in Spanish?"}]
    (second,) = llm.generate(messages, SamplingParams(max_tokens=8))
    assert second.stats.reused > 40
    (fresh,) = plain.generate(messages, SamplingParams(max_tokens=8))
    assert second.token_ids == fresh.token_ids


def test_round_trip_of_text(plain):
    for text in ("naïve café 12345\n\tif x >= 3:\n", "数字 🙂 é", "  two  spaces "):
        assert plain.tokenizer.decode(plain.tokenizer.encode(text)) == text


def test_readme_python_blocks_run(capsys):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    found = re.findall(r"```python\n(.*?)```", text, re.S)
    assert found
    for block in found:
        names: dict[str, object] = {"__name__": "readme"}
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert names["answer"].text in printed
    assert printed.endswith(names["stream"].completion.text), "the streamed text is printed once"
