"""Every published head layout: loads strictly, and equals an independent reference while it drafts."""

from __future__ import annotations

import json

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.drafters import DrafterContext, build_drafter
from foretell.errors import InputError
from foretell.sampling import Sampler
from foretell.types import Needs, SamplingParams
from tests import head_files, oracle, reference_heads

PROMPTS = [[5, 17, 33, 8, 61], [7], [90, 3, 90, 3, 55, 12, 13, 14, 15, 16, 17], [40, 41, 9, 40, 41, 9, 40]]
AUX = (2, head_files.LAYERS // 2, head_files.LAYERS - 3)
OUTPUTS = [layer - 1 for layer in AUX]

# name -> (writer, drafter, reference)
LAYOUTS = {
    "eagle, bias by default": (
        lambda f: head_files.eagle(f), "eagle", lambda f, t: reference_heads.Eagle(f, t)),
    "eagle, target's embedding": (
        lambda f: head_files.eagle(f, bias=False, own_embedding=False), "eagle",
        lambda f, t: reference_heads.Eagle(f, t)),
    "eagle, qwen2": (
        lambda f: head_files.eagle(f, bias=True, qwen=True), "eagle",
        lambda f, t: reference_heads.Eagle(f, t)),
    "eagle3, SafeAILab": (
        lambda f: head_files.eagle3(f, "safeailab"), "eagle3",
        lambda f, t: reference_heads.Eagle3(f, t, AUX)),
    "eagle3, SpecForge": (
        lambda f: head_files.eagle3(f, "specforge", ids=OUTPUTS), "eagle3",
        lambda f, t: reference_heads.Eagle3(f, t, AUX)),
    "eagle3, SpecForge, full vocabulary": (
        lambda f: head_files.eagle3(f, "specforge", reduced=None, ids=[0, 3, 6]), "eagle3",
        lambda f, t: reference_heads.Eagle3(f, t, (1, 4, 7))),
    "eagle3, AngelSlim": (
        lambda f: head_files.eagle3(f, "angelslim", own_embedding=False), "eagle3",
        lambda f, t: reference_heads.Eagle3(f, t, AUX)),
    "eagle3, speculators": (
        lambda f: head_files.eagle3(
            f, "speculators", ids=[1, 3, 8], norm_before_residual=True, own_embedding=False),
        "eagle3", lambda f, t: reference_heads.Eagle3(f, t, (1, 3, 8))),
    "eagle3, norm_before_fc": (
        lambda f: head_files.eagle3(
            f, "speculators", norm_before_fc=True, norm_before_residual=True, norm_output=True),
        "eagle3", lambda f, t: reference_heads.Eagle3(f, t, AUX)),
    "eagle3, 3.1": (
        lambda f: head_files.eagle3(f, "specforge", fc_norm=True, norm_output=True), "eagle3",
        lambda f, t: reference_heads.Eagle3(f, t, AUX)),
    "mtp, MiMo": (head_files.mimo, "mtp", lambda f, t: reference_heads.Mtp(f, t, "mimo")),
    "mtp, Qwen3-Next": (head_files.qwen3_next, "mtp", lambda f, t: reference_heads.Mtp(f, t, "qwen3_next")),
    "mtp, Qwen3-Next, dense": (
        lambda f: head_files.qwen3_next(f, experts=False), "mtp",
        lambda f, t: reference_heads.Mtp(f, t, "qwen3_next")),
    "mtp, DeepSeek-V3": (head_files.deepseek, "mtp", lambda f, t: reference_heads.Mtp(f, t, "deepseek")),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


def true_states(target, tokens):
    """Last hidden states and residual streams of a text, computed at once."""
    batch = pack([Segment(0, 0, list(tokens))], target.new_arena(len(tokens)))
    out = target.forward(batch, Needs(last_hidden=True, aux_layers=tuple(range(target.num_layers + 1))))
    return out.hidden_TW, out.aux_TW


class Ranked:
    """Records what every draft was ranked by: (tokens, path) -> logits."""

    def __init__(self, monkeypatch):
        self.seen = {}
        real = Sampler.rank

        def rank(sampler, logits_V, ahead, count):
            self.seen[tuple(sampler._tokens), tuple(ahead)] = logits_V.clone()
            return real(sampler, logits_V, ahead, count)

        monkeypatch.setattr(Sampler, "rank", rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tree", ["dynamic", "eagle1"])
def test_every_layout_equals_its_reference(layout, tree, target, tmp_path, monkeypatch):
    """Through rounds of accepting and rejecting, in a batch of unequal lengths, with prefix hits."""
    make, drafter, reference = LAYOUTS[layout]
    folder = make(tmp_path / "head")
    wanted = reference(folder, target)
    options = {"tree": tree, "depth": 4, "top_k": 3}
    engine = oracle.engine(target, f"{drafter}:{folder}", options=options, draft_tokens=9, kv_slots=256)
    ranked = Ranked(monkeypatch)
    params = SamplingParams(max_tokens=12)
    for _ in range(2):  # the second time, the prompts are found in the cache
        for request in oracle.run(engine, PROMPTS, params):
            prompt = request.tokens[: request.prompt_length]
            assert request.output_ids == oracle.generate(target, prompt, params)
    paths = [len(path) for _, path in ranked.seen]
    assert max(paths) >= 2, "no draft was expanded"
    worst = 0.0
    for (tokens, path), logits_V in list(ranked.seen.items())[::5]:
        hidden, aux = true_states(target, tokens)
        expected_V = wanted.logits(tokens, wanted.states(hidden, aux), path)
        assert torch.equal(logits_V == -torch.inf, expected_V == -torch.inf)
        finite = expected_V > -torch.inf
        worst = max(worst, float((logits_V - expected_V)[finite].abs().max()))
    assert worst < 1e-5 * max(1.0, float(expected_V[finite].abs().max())), worst


@pytest.mark.parametrize("layout", ["v0.1", "v1.0"])
@pytest.mark.parametrize("own_output", [True, False])
def test_medusa_equals_its_reference(layout, own_output, target, tmp_path, monkeypatch):
    folder = head_files.medusa(tmp_path / "head", layout, own_output=own_output)
    engine = oracle.engine(target, f"medusa:{folder}", draft_tokens=9)
    ranked = Ranked(monkeypatch)
    oracle.run(engine, PROMPTS, SamplingParams(max_tokens=10))
    _, w = reference_heads.read(folder)
    w = {name.removeprefix("medusa_head."): tensor for name, tensor in w.items()}
    depths = set()
    for (tokens, path), logits_V in ranked.seen.items():
        hidden, _ = true_states(target, tokens[:-1])
        k, x = len(path), hidden[-1]
        z = x @ w[f"{k}.0.linear.weight"].T + w[f"{k}.0.linear.bias"]
        x = x + z / (1 + (-z).exp())
        expected_V = x @ w[f"{k}.1.weight"].T if own_output else target.head(x[None])[0]
        torch.testing.assert_close(logits_V, expected_V, atol=1e-5, rtol=1e-5)
        depths.add(k)
    assert depths == {0, 1, 2}, "the tensors are counted, whatever the configuration says"


def context(target):
    return DrafterContext(target, None, 256)


def edit(folder, change):
    """Changes the tensors of a safetensors or .bin checkpoint."""
    config, tensors = reference_heads.read(folder)
    change(tensors)
    file = next(p.name for p in folder.iterdir() if p.name != "config.json")
    head_files.write(folder, config, tensors, file)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_unknown_and_misshaped_tensors_are_listed(layout, target, tmp_path):
    make, drafter, _ = LAYOUTS[layout]
    folder = make(tmp_path / "head")

    def damage(tensors):
        norms = sorted(n for n in tensors if "post_attention_layernorm" in n)
        del tensors[norms[0]]
        down = next(n for n in sorted(tensors) if n.endswith("down_proj.weight"))
        tensors[down] = torch.zeros(3, 5)
        tensors[norms[0].replace("post_attention_layernorm", "surprise")] = torch.zeros(4)

    edit(folder, damage)
    with pytest.raises(InputError) as error:
        build_drafter(f"{drafter}:{folder}", {}, context(target))
    for word in ("missing: ", "post_attention_layernorm", "unknown: ", "surprise", "misshaped: ", "(3, 5)"):
        assert word in error.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size"),
        ({"num_hidden_layers": 3}, "one layer"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"intermediate_size": "many"}, "cannot be used"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type"),
    ],
)
def test_bad_configurations_of_a_head(change, message, target, tmp_path):
    folder = head_files.eagle(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message):
        build_drafter(f"eagle:{folder}", {}, context(target))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("eagle:/nowhere", "is not a folder"),
        ("eagle3:/nowhere", "is not a folder"),
        ("medusa:/nowhere", "is not a folder"),
        ("mtp:/nowhere", "is not a folder"),
        ("mtp", "mtp:PATH"),
        ("eagle", "needs an argument"),
    ],
)
def test_bad_head_arguments(drafter, message, target):
    with pytest.raises(InputError) as error:
        build_drafter(drafter, {}, context(target))
    assert message in f"{error.value.message} {error.value.hint}"


def test_wrong_heads_and_files(target, tmp_path):
    eagle = head_files.eagle(tmp_path / "eagle")
    for name in ("mtp", "medusa", "eagle3"):
        with pytest.raises(InputError):
            build_drafter(f"{name}:{eagle}", {}, context(target))
    (eagle / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="damaged or truncated"):
        build_drafter(f"eagle:{eagle}", {}, context(target))


def test_vocabulary_maps_are_checked(target, tmp_path):
    folder = head_files.eagle3(tmp_path / "head", "specforge")
    edit(folder, lambda t: t.update(d2t=torch.zeros(60, dtype=torch.int64) + torch.arange(60).flip(0) * 2))
    with pytest.raises(InputError, match="d2t"):
        build_drafter(f"eagle3:{folder}", {}, context(target))


@pytest.mark.parametrize(
    ("layout", "ids", "option", "wanted"),
    [
        ("specforge", None, "auto", AUX),
        ("specforge", list(AUX), "auto", AUX),  # the default inputs tell themselves apart
        ("specforge", OUTPUTS, "auto", AUX),
        ("specforge", [0, 3, 5], "auto", (1, 4, 6)),
        ("specforge", [0, 3, 5], "input", (0, 3, 5)),
        ("speculators", [0, 3, 5], "auto", (0, 3, 5)),
        ("speculators", [0, 3, 5], "output", (1, 4, 6)),
        ("speculators", OUTPUTS, "auto", AUX),
        ("speculators", [2, 3, head_files.LAYERS], "auto", (2, 3, head_files.LAYERS)),
    ],
)
def test_both_conventions_of_layer_ids(layout, ids, option, wanted, target, tmp_path):
    from foretell.heads.eagle3 import load_eagle3

    folder = head_files.eagle3(tmp_path / "head", layout, ids=ids)
    head = load_eagle3(folder, target.num_layers, target.hidden_size, target.vocab_size, option)
    assert head.config.aux_layers == wanted


def test_layer_ids_outside_the_target(target, tmp_path):
    folder = head_files.eagle3(tmp_path / "head", "specforge", ids=[1, 3, head_files.LAYERS])
    with pytest.raises(InputError, match="layers") as error:
        build_drafter(f"eagle3:{folder}", {}, context(target))
    assert "layer_ids" in error.value.hint


def test_a_prefix_hit_that_the_heads_cache_lost(target, tmp_path):
    """The target finds the prompt in its cache, the head does not: its features are not computed again, so
    its cache begins later, at the right positions, and no other request may reuse those rows."""
    folder = head_files.eagle(tmp_path / "head")
    drafter = build_drafter(f"eagle:{folder}", {}, context(target))
    engine = oracle.engine(target, drafter, draft_tokens=6)
    params, prompt = SamplingParams(max_tokens=12), PROMPTS[2]
    wanted = oracle.generate(target, prompt, params)
    for _ in range(3):
        drafter._cache.forget()
        request = engine.submit(prompt, params, frozenset())
        shifts = set()
        while not engine.idle:
            engine.step()
            shifts |= {state.shift for state in drafter._states.values()}
        assert request.output_ids == wanted
    assert shifts == {len(prompt) - 1}
    assert request.stats.drafts > 3
    assert not drafter._cache._kept


def test_heads_inside_the_targets_checkpoint(decoder, model_folder, tmp_path):
    """A MiMo model: Qwen2's graph and its module in one folder; the decoder leaves the module alone."""
    from foretell.models.decoder import load_decoder

    base = model_folder("qwen2", **head_files.TARGET)
    config, tensors = reference_heads.read(base)
    _, module = reference_heads.read(head_files.mimo(tmp_path / "module"))
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "rms_norm_eps": 1e-5}
    folder = head_files.write(tmp_path / "model", config, tensors | module)
    model = load_decoder(folder, torch.float32, torch.device("cpu"))
    drafter = build_drafter("mtp", {}, DrafterContext(model, None, 256, folder))
    params = SamplingParams(max_tokens=10)
    for request in oracle.run(oracle.engine(model, drafter), PROMPTS, params):
        assert request.output_ids == oracle.generate(model, request.tokens[: request.prompt_length], params)
