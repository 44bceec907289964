"""Queries that a pass hands out, and a pass that reads a selection, against transformers' own attention."""

from __future__ import annotations

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.models.decoder import load_decoder
from foretell.models.hf import load_hf
from foretell.sparse import attention_mass
from foretell.types import Needs
from tests import zoo

CPU = torch.device("cpu")
TOKENS = [5, 17, 33, 8, 61, 40, 41, 9, 12, 77, 3, 28]
LOADERS = {
    "whole": lambda folder: load_decoder(folder, torch.float32, CPU),
    "loop": lambda folder: _loop(load_decoder(folder, torch.float32, CPU)),
    "hf": lambda folder: load_hf(folder, torch.float32, CPU),
}


def _loop(model):
    model._whole = None
    return model


@pytest.mark.parametrize("impl", LOADERS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window", "qwen3"])
def test_captured_queries_give_transformers_attention(name, impl, model_folder):
    """In two chunks, two of three layers; sliding windows are honoured."""
    model = LOADERS[impl](model_folder(name))
    with torch.inference_mode():
        wanted = zoo.build(name)(torch.tensor([TOKENS]), output_attentions=True).attentions
    arena, needs = model.new_arena(32), Needs(queries=(0, 2))
    outputs = [
        model.forward(pack([Segment(4, 0, TOKENS[:7])], arena), needs),
        model.forward(pack([Segment(4, 7, TOKENS[7:])], arena), needs),
    ]
    for layer in (0, 2):
        assert set(outputs[0].queries) == {0, 2}
        q_THD = torch.cat([output.queries[layer].q_THD for output in outputs])
        keys_KND = arena.layer(layer)[0][:, 4 : 4 + len(TOKENS)]
        spec = outputs[0].queries[layer].spec
        mass = attention_mass(q_THD, keys_KND, spec, range(4), range(len(TOKENS)))
        torch.testing.assert_close(mass.transpose(0, 1), wanted[layer][0], atol=1e-5, rtol=1e-4)
    assert not model.forward(pack([Segment(4, 7, TOKENS[7:])], arena)).queries


def test_capturing_changes_no_bit(decoder):
    model = decoder("llama")
    plain = model.forward(pack([Segment(0, 0, TOKENS)], model.new_arena(16)))
    watched = model.forward(pack([Segment(0, 0, TOKENS)], model.new_arena(16)), Needs(queries=(1,)))
    assert torch.equal(plain.logits_RV, watched.logits_RV)


def _masked_logits(name: str, hidden: list[int]) -> torch.Tensor:
    """transformers' logits of the last two tokens when these positions are masked for both of them."""
    model = zoo.build(name)
    count = len(TOKENS)
    mask = torch.full((count, count), -torch.inf).triu(1)
    mask[count - 2 :, hidden] = -torch.inf
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([TOKENS]), attention_mask=mask[None, None])
    return out.logits[0, -2:].float()


@pytest.mark.parametrize("impl", LOADERS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_selected_pass_is_a_masked_pass(name, impl, model_folder):
    """Prompt read whole; then two tokens that read some of its positions, at their true positions, beside a
    request that reads all of its own."""
    model, hidden = LOADERS[impl](model_folder(name)), [1, 2, 5, 8]
    arena, past = model.new_arena(64), len(TOKENS) - 2
    model.forward(pack([Segment(3, 0, TOKENS[:-2]), Segment(32, 0, TOKENS[:3])], arena))
    selected = torch.tensor([n for n in range(past) if n not in hidden])
    sparse = Segment(3, past, TOKENS[-2:-1], TOKENS[-1:], [-1], selected=selected)
    dense = Segment(32, 3, TOKENS[3:4])
    logits = model.forward(pack([sparse, dense], arena)).logits_RV
    torch.testing.assert_close(logits[:2], _masked_logits(name, hidden), atol=1e-4, rtol=1e-4)
    alone = model.new_arena(64)
    whole = model.forward(pack([Segment(0, 0, TOKENS[:4])], alone)).logits_RV[0]
    torch.testing.assert_close(logits[2], whole, atol=1e-5, rtol=1e-5)


def test_selecting_everything_changes_no_bit(decoder):
    """The list of all slots, in their order, is the range itself; also beside scattered ancestors."""
    model, past = decoder("llama"), 8
    logits = []
    for selected in (None, torch.arange(past)):
        arena = model.new_arena(32)
        model.forward(pack([Segment(0, 0, TOKENS[:past])], arena))
        tree = Segment(0, past, [12], [4, 5, 6, 7], [-1, -1, 0, 1], selected=selected)
        logits.append(model.forward(pack([tree], arena)).logits_RV)
    assert torch.equal(*logits)
