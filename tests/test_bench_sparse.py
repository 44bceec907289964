"""`foretell bench attention` and `verification` on tiny shapes: what they write, and their arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

from foretell.bench import attention, verification
from foretell.models.config import decoder_config, read_config
from foretell.planner.arithmetic import Machine
from foretell.sparse import POLICIES


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Nothing is measured that the tests do not look at."""
    monkeypatch.setattr(verification, "measure_machine", lambda: Machine(1e10, 1e11))


def test_attention_writes_readings_and_choices(foretell, tmp_path):
    args = ("--keys", "512", "--batch", "2", "--heads", "4/2/16", "--layers", "3", "--rows", "3")
    code, out, _ = foretell(
        "bench", "attention", *args, "--kv-budget", "48", "--repeats", "1", "--json", "--out", str(tmp_path)
    )
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["context"] for row in rows if "context" in row] == [64, 128, 256, 512]
    asked = {(row["policy"], row["heads_asked"]) for row in rows if "policy" in row}
    assert {name for name, _ in asked} == set(POLICIES)
    assert ("streaming", 0) in asked
    assert all(row["ms_per_step"] > 0 for row in rows if "policy" in row)
    written = json.loads((tmp_path / "attention.json").read_text())
    assert written["layout"]["kv_heads"] == 2
    assert written["results"] == rows
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_shares_are_of_all_layers(monkeypatch):
    """2 s of choosing against 4 layers of 5 s, or of 1 s."""
    world = attention.World(attention.Layout(8, 2, 16, 4, 1, 2, 16), 32)
    monkeypatch.setattr(world, "choosing", lambda *_: 2.0)
    reading = attention.Reading(32, full=5.0, selected=1.0, plain=1.0, unfolded=9.0)
    made = attention.measure_choosing(world, reading, 1, 1, 1, lambda: None)
    assert {(c.share, c.plain_share) for c in made} == {(0.1, 0.5)}
    assert [c.asked for c in made if c.policy == "dustin"] == [4, 8]
    assert [c.asked for c in made if c.policy == "streaming"] == [0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("attention", "--heads", "14/4/64"), "heads must be query heads / key-value heads / head size"),
        (("attention", "--heads", "14/2"), "got '14/2'"),
        (("attention", "--keys", "512"), "keys must be more than kv_budget (512), got 512"),
        (("verification", "--cell", "8192"), "cell must be CONTEXTxBATCH, got '8192'"),
        (("verification", "--cell", "512x4"), "a context must be more than kv_budget (512)"),
        (("verification", "--kv", "qest"), "unknown kv 'qest'"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(args, says, foretell, tmp_path):
    code, _, err = foretell("bench", *args, "--out", str(tmp_path))
    assert code == 2
    assert says in err


def test_verification_writes_steps_and_speeds(foretell, model_folder, tmp_path):
    args = ("-m", str(model_folder("llama")), "--cell", "64x2", "--cell", "100x1", "--kv-budget", "16")
    code, out, _ = foretell(
        "bench", "verification", *args, "--rows", "3", "--al", "2.5", "--draft-ms", "1", "--repeats", "1",
        *("--json", "--out", str(tmp_path)),
    )  # fmt: skip
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["context"], first["batch"], second["batch"]) == (64, 2, 1)
    assert first["layers_with_own_memory"] == 3
    spent = (first["sparse_ms"] + 1) / 2.5
    assert first["speedup"] == pytest.approx(first["plain_ms"] / spent, rel=0.02)
    assert first["al_for_4x"] == pytest.approx(4 * (first["sparse_ms"] + 1) / first["plain_ms"], rel=0.02)
    assert (tmp_path / "verification.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "verification.json").read_text())["gb_per_s"] == 10


def test_drafting_time_without_a_length_has_no_effect(foretell, model_folder, tmp_path):
    args = ("-m", str(model_folder("llama")), "--cell", "40x1", "--kv-budget", "16", "--repeats", "1")
    code, _, err = foretell("bench", "verification", *args, "--draft-ms", "2", "--out", str(tmp_path))
    assert code == 0
    assert "--draft-ms has no effect without --al" in err


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
def test_weights_are_counted(name, model_folder):
    """Against the checkpoint: all matrices, the embedding only where it is the head."""
    from safetensors.torch import load_file

    folder = model_folder(name)
    config = decoder_config(read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    matrices = {n: t for n, t in tensors.items() if t.ndim == 2}
    if not config.tied:
        matrices.pop("model.embed_tokens.weight")
    count = sum(t.numel() for t in matrices.values())
    assert verification.parameters(config) == count
    assert verification.weight_bytes(folder, config, "fp16") == 2 * count
    assert verification.weight_bytes(folder, config, "stored") == pytest.approx(4 * count, rel=0.2)


def test_the_roofline_by_hand(model_folder):
    config = decoder_config(read_config(model_folder("llama")))  # 3 layers, 4/2 heads of 8
    machine = Machine(bandwidth=1000.0, flops=1e12)
    cell = verification.Cell(100, 2)
    # weights 5000 bytes: 5 s; keys: 3 layers x 2 requests x 100 x 2 heads x 8 x 2 x 4 bytes
    assert verification.predict(machine, config, 5000, cell, 1, 100) == pytest.approx(5 + 6 * 12.8)
    slow = Machine(bandwidth=1e12, flops=1000.0)
    products = 2 * verification.parameters(config) * 2 * 3 / 1000
    scores = 3 * 2 * 4 * 4 * 8 * 3 * 100 / 1000
    assert verification.predict(slow, config, 5000, cell, 3, 100) == pytest.approx(products + scores)


@pytest.mark.parametrize("own", [True, False])
def test_layers_share_memory_where_there_is_too_little(own, decoder):
    model = decoder("llama")
    world = verification.World(
        model, verification.Cell(60, 2), 3, POLICIES["dustin"], 16, 1e9 if own else 0.0
    )
    assert world.layers_kept == (3 if own else 1)
    assert world.arena.keys_LKSD.shape == (3, 2, 126, 8)
    assert torch.equal(*world.arena.keys_LKSD[:2]) != own
    steps = verification.measure(world, Machine(1e10, 1e11), 1e6, 1, lambda: None)
    assert 0 < steps.selecting < steps.sparse
    assert steps.roofline[1] > steps.roofline[2]
