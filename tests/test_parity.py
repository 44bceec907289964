"""Logits equal to transformers' on every architecture: prefill, packed requests, trees with branches.

Windows are smaller than the prompts, so that they bite.
"""

from __future__ import annotations

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.models.decoder import load_decoder
from foretell.models.hf import TESTED, load_hf
from foretell.types import Needs
from tests import zoo

CPU = torch.device("cpu")
PROMPT = [5, 17, 33, 8, 61, 90, 14, 3, 77, 21]
OTHER = [40, 41, 9]
#        root ─ 11 ─ 12 ─ 13
#             │      └ 14
#             └ 20 ─ 21
TREE = ([11, 20, 12, 14, 21, 13], [-1, -1, 0, 0, 1, 2])


def tree_path(node: int) -> list[int]:
    tokens, parents = TREE
    above = tree_path(parents[node]) if parents[node] >= 0 else []
    return [*above, tokens[node]]


def check_parity(model, reference) -> None:
    """One request reads a prompt and verifies a tree beside it, while another decodes."""
    arena = model.new_arena(64)
    model.forward(pack([Segment(0, 0, PROMPT[:-1]), Segment(32, 0, OTHER[:-1])], arena))
    batch = pack(
        [Segment(0, len(PROMPT) - 1, PROMPT[-1:], *TREE), Segment(32, len(OTHER) - 1, OTHER[-1:])], arena
    )
    logits = model.forward(batch).logits_RV
    assert logits.shape == (2 + len(TREE[0]), zoo.SMALL["vocab_size"])
    wanted = [zoo.path_logits(reference, PROMPT)[-1]]
    wanted += [zoo.path_logits(reference, PROMPT + tree_path(node))[-1] for node in range(len(TREE[0]))]
    wanted += [zoo.path_logits(reference, OTHER)[-1]]
    torch.testing.assert_close(logits, torch.stack(wanted), atol=1e-4, rtol=1e-4)


def prefill_logits(model, tokens: list[int]) -> torch.Tensor:
    """All rows' logits of a prompt: a chain draft gets them."""
    arena = model.new_arena(64)
    chain = list(range(-1, len(tokens) - 2))
    return model.forward(pack([Segment(0, 0, tokens[:1], tokens[1:], chain)], arena)).logits_RV


def check_states(model, reference) -> None:
    """What draft heads read: every layer's input, the last hidden states, embedding and output head."""
    layers = tuple(range(model.num_layers))
    batch = pack([Segment(0, 0, PROMPT)], model.new_arena(16))
    out = model.forward(batch, Needs(last_hidden=True, aux_layers=layers))
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        wanted = reference(input_ids=ids, use_cache=False, output_hidden_states=True)
        embedded = reference.get_input_embeddings()(ids)[0]
    for layer in layers:
        torch.testing.assert_close(out.aux_TW[layer], wanted.hidden_states[layer][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(out.hidden_TW), wanted.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.embed(ids[0]), embedded, atol=1e-6, rtol=1e-6)
    assert model.hidden_size == out.hidden_TW.shape[1]


@pytest.mark.parametrize("name", zoo.OWN)
def test_decoder_equals_transformers(name, model_folder):
    model, reference = load_decoder(model_folder(name), torch.float32, CPU), zoo.build(name)
    torch.testing.assert_close(
        prefill_logits(model, PROMPT), zoo.path_logits(reference, PROMPT), atol=1e-4, rtol=1e-4
    )
    check_parity(model, reference)
    check_states(model, reference)


@pytest.mark.parametrize("name", list(zoo.FAMILY))
def test_hf_adapter_equals_transformers(name, model_folder):
    model, reference = load_hf(model_folder(name), torch.float32, CPU), zoo.build(name)
    torch.testing.assert_close(
        prefill_logits(model, PROMPT), zoo.path_logits(reference, PROMPT), atol=1e-4, rtol=1e-4
    )
    check_parity(model, reference)
    check_states(model, reference)


def test_every_architecture_of_the_table_is_tested():
    assert {model_class for _, model_class, _ in zoo.FAMILY.values()} == set(TESTED)
