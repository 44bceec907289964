"""A head goes round through every layout and comes back the same; what a layout lacks is said."""

from __future__ import annotations

import json

import pytest
import torch

from foretell.errors import InputError
from foretell.heads.checkpoint import KIND
from foretell.models.load import LoadedModel
from foretell.train.convert import LAYOUTS, convert, kind_of
from foretell.train.export import save_head
from foretell.train.resume import load_head
from foretell.types import SamplingParams
from tests import head_files, oracle
from tests.test_train import IDS, new_head

ROUNDS = [(name, kind) for name, layout in LAYOUTS.items() for kind in layout.kinds]


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


@pytest.fixture(scope="module")
def loaded(target, model_folder):
    folder = model_folder("llama", **head_files.TARGET)
    return LoadedModel("tiny", folder, target, None, frozenset())


def halved(head):
    """As it is after half precision."""
    return {
        slot.name.removeprefix("midlayer.").removeprefix("layers.0."): slot.view.detach().half().float()
        for slot in head.slots()
    }


@pytest.mark.parametrize(("form", "kind"), ROUNDS)
def test_round_trip(form, kind, target, loaded, tmp_path):
    head, config = new_head(kind, target)
    save_head(kind, head, config, IDS, tmp_path / "own", torch.float32)
    convert(kind, tmp_path / "own", loaded, form, tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert KIND not in written
    theirs, _ = load_head(kind, tmp_path / "theirs", target)
    convert(kind, tmp_path / "theirs", loaded, "foretell", tmp_path / "back")
    assert kind_of(tmp_path / "back", None) == kind
    back, _ = load_head(kind, tmp_path / "back", target)
    wanted = halved(head)
    for each in (theirs, back):
        found = halved(each)
        assert set(wanted) <= set(found)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    if kind == "eagle3":
        assert back.target_ids.tolist() == IDS.tolist()
        assert back.config.aux_layers == head.config.aux_layers
    params = SamplingParams(max_tokens=8)
    engine = oracle.engine(target, f"{kind}:{tmp_path / 'theirs'}", draft_tokens=4)
    for request in oracle.run(engine, oracle.PROMPTS, params):
        assert request.output_ids == oracle.generate(target, request.tokens[: request.prompt_length], params)
    assert engine.stats.drafted


def test_medusa_s_layout_has_output_layers(target, loaded, tmp_path):
    head, config = new_head("medusa", target)
    save_head("medusa", head, config, IDS, tmp_path / "own", torch.float32)
    convert("medusa", tmp_path / "own", loaded, "medusa", tmp_path / "theirs")
    theirs, _ = load_head("medusa", tmp_path / "theirs", target)
    state = torch.randn(3, head_files.HIDDEN)
    for output in theirs.outputs:
        torch.testing.assert_close(output(state), target.head(state), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("ids", [None, [1, 4, 7]])
@pytest.mark.parametrize("layout", ["angelslim", "speculators"])
def test_published_heads_are_imported(layout, ids, target, loaded, tmp_path):
    head_files.eagle3(tmp_path / "theirs", layout, ids=ids)
    convert("eagle3", tmp_path / "theirs", loaded, "foretell", tmp_path / "ours")
    theirs, _ = load_head("eagle3", tmp_path / "theirs", target)
    ours, _ = load_head("eagle3", tmp_path / "ours", target)
    assert ours.config.aux_layers == theirs.config.aux_layers
    assert ours.target_ids.tolist() == theirs.target_ids.tolist()
    convert("eagle3", tmp_path / "ours", loaded, "specforge", tmp_path / "again")
    again, _ = load_head("eagle3", tmp_path / "again", target)
    assert again.config.aux_layers == theirs.config.aux_layers
    for a, b in zip(theirs.slots(), ours.slots(), strict=True):
        assert torch.equal(a.view.half().float(), b.view)


def test_what_does_not_fit_is_said(target, loaded, tmp_path):
    head, config = new_head("mtp", target)
    save_head("mtp", head, config, IDS, tmp_path / "own")
    with pytest.raises(InputError, match="format medusa has no mtp heads"):
        convert("mtp", tmp_path / "own", loaded, "medusa", tmp_path / "out")
    with pytest.raises(InputError, match="format must be one of foretell, safeailab"):
        convert("mtp", tmp_path / "own", loaded, "onnx", tmp_path / "out")
    with pytest.raises(InputError, match=r"kind is 'eagle', but .* says it is 'mtp'"):
        kind_of(tmp_path / "own", "eagle")
    with pytest.raises(InputError, match="does not say what kind"):
        kind_of(head_files.eagle(tmp_path / "eagle"), None)
    assert not (tmp_path / "out").exists()
