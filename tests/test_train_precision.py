"""The arithmetic in which a target reads its answers for a training."""

from __future__ import annotations

import pytest
import torch

from foretell.errors import InputError
from foretell.models.load import load_model
from foretell.train.answers import Sample
from foretell.train.precision import pick_precision, reader
from foretell.train.states import StateStore
from foretell.types import Needs

CPU = torch.device("cpu")
SAMPLES = [Sample(tuple(range(3, 40)), 5), Sample(tuple(range(60, 20, -1)), 9)]


def has(monkeypatch, *, products: bool, fast: bool) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: products)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def test_auto_is_bf16_only_where_the_machine_is_faster_in_it(monkeypatch):
    can = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    has(monkeypatch, products=True, fast=True)
    assert pick_precision("auto", CPU) == (torch.bfloat16 if can else torch.float32)
    has(monkeypatch, products=True, fast=False)
    assert pick_precision("auto", CPU) == pick_precision("fp32", CPU) == torch.float32
    has(monkeypatch, products=False, fast=True)
    assert pick_precision("auto", CPU) == torch.float32
    with pytest.raises(InputError, match="precision bf16 is not to be had on this cpu"):
        pick_precision("bf16", CPU)
    with pytest.raises(InputError, match="precision must be one of auto, fp32, bf16, got 'fp8'"):
        pick_precision("fp8", CPU)


def test_a_reader_in_bf16_sees_about_the_same_states(tiny_gguf):
    loaded = load_model(str(tiny_gguf))
    needs = Needs(last_hidden=True, aux_layers=(1,))
    assert reader(loaded, torch.float32) is loaded.model
    half = reader(loaded, torch.bfloat16)
    assert (half.dtype, loaded.model.dtype) == (torch.bfloat16, torch.float32)
    for whole, rounded in zip(
        *(StateStore(model, needs, SAMPLES, None, 0).get([0, 1]) for model in (loaded.model, half)),
        strict=True,
    ):
        for name, want in whole.tensors().items():
            have = rounded.tensors()[name]
            if name == "best":
                assert have.shape == want.shape
                continue
            error = (have - want).norm() / want.norm()
            assert 0 < error < 0.05, name


def test_a_target_with_rounded_weights_reads_for_itself(tiny_gguf):
    """Its copy in bf16 would be another model than the one that drafts are made for."""
    loaded = load_model(str(tiny_gguf), weights="fp16")
    assert reader(loaded, torch.bfloat16) is loaded.model
