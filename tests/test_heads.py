"""Every published head layout: loads strictly, and equals an independent reference while it drafts."""

from __future__ import annotations

import json

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.drafters import DrafterContext, build_drafter, feature
from foretell.errors import InputError
from foretell.planner import FixedPlanner
from foretell.sampling import Sampler
from foretell.types import Needs, SamplingParams, StepPlan
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
    """Records what every draft was ranked by: (tokens, path) -> logits over the target's ids."""

    def __init__(self, monkeypatch, vocab_size):
        self.seen = {}
        real = Sampler.rank

        def rank(sampler, logits_V, ahead, count, ids_V=None):
            whole_V = torch.full((vocab_size,), -torch.inf)
            whole_V[torch.arange(len(logits_V)) if ids_V is None else ids_V] = logits_V
            self.seen[tuple(sampler._tokens), tuple(ahead)] = whole_V
            return real(sampler, logits_V, ahead, count, ids_V)

        monkeypatch.setattr(Sampler, "rank", rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tree", ["dynamic", "eagle1"])
def test_every_layout_equals_its_reference(layout, tree, target, tmp_path, monkeypatch):
    """Through rounds of accepting and rejecting, in a batch of unequal lengths, with prefix hits."""
    make, drafter, reference = LAYOUTS[layout]
    folder = make(tmp_path / "head")
    wanted = reference(folder, target)
    options = {"tree": tree, "depth": 4, "top_k": 3, "weights": "stored"}
    engine = oracle.engine(target, f"{drafter}:{folder}", options=options, draft_tokens=9, kv_slots=256)
    ranked = Ranked(monkeypatch, target.vocab_size)
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
    engine = oracle.engine(target, f"medusa:{folder}", options={"weights": "stored"}, draft_tokens=9)
    ranked = Ranked(monkeypatch, target.vocab_size)
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


def mimo_model(model_folder, tmp_path, more=None):
    """A MiMo model: Qwen2's graph and its module in one folder, and maybe more tensors."""
    from foretell.models.decoder import load_decoder

    config, tensors = reference_heads.read(model_folder("qwen2", **head_files.TARGET))
    _, module = reference_heads.read(head_files.mimo(tmp_path / "module"))
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "rms_norm_eps": 1e-5}
    folder = head_files.write(tmp_path / "model", config, tensors | module | (more or {}))
    return load_decoder(folder, torch.float32, torch.device("cpu")), folder


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
        ({"num_hidden_layers": None}, "one layer"),
        ({"num_hidden_layers": "x"}, "one layer"),
        ({"num_attention_heads": 0}, "cannot be used"),
        ({"head_dim": -8}, "cannot be used"),
        ({"intermediate_size": -1}, "cannot be used"),
        ({"partial_rotary_factor": 3}, "cannot be used"),
        ({"max_position_embeddings": 0}, "cannot be used"),
        ({"num_key_value_heads": 3}, "cannot be used"),
    ],
)
def test_bad_configurations_of_a_head(change, message, target, tmp_path):
    folder = head_files.eagle(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message):
        build_drafter(f"eagle:{folder}", {}, context(target))


@pytest.mark.parametrize(
    ("writer", "drafter", "change"),
    [
        (lambda f: head_files.eagle3(f, "specforge"), "eagle3", {"eagle_config": "x"}),
        (lambda f: head_files.eagle3(f, "specforge"), "eagle3", {"eagle_aux_hidden_state_layer_ids": 5}),
        (lambda f: head_files.eagle3(f, "specforge"), "eagle3", {"eagle_aux_hidden_state_layer_ids": ["a"]}),
        (lambda f: head_files.eagle3(f, "speculators"), "eagle3", {"transformer_layer_config": "x"}),
        (head_files.mimo, "mtp", {"num_hidden_layers": "x"}),
        (head_files.mimo, "mtp", {"text_config": "x"}),
        (head_files.qwen3_next, "mtp", {"num_experts_per_tok": 99}),
        (head_files.deepseek, "mtp", {"n_group": 3}),
        (head_files.deepseek, "mtp", {"n_routed_experts": -4}),
    ],
)
def test_bad_values_are_errors_at_the_door(writer, drafter, change, target, tmp_path):
    folder = writer(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError):
        build_drafter(f"{drafter}:{folder}", {}, context(target))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("eagle:/nowhere", "is not a folder"),
        ("eagle3:/nowhere", "is not a folder"),
        ("medusa:/nowhere", "is not a folder"),
        ("mtp:/nowhere", "is not a folder"),
        ("mtp", "mtp:PATH"),
        ("eagle", "eagle:PATH"),
        ("eagle3", "foretell train eagle3"),
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
    assert shifts == {len(prompt) - 2}, "the last state of the prefix is computed again"
    assert request.stats.drafts > 3
    assert not drafter._cache._kept


def test_a_prefix_that_comes_while_a_request_waits_is_the_heads_too(target, tmp_path):
    """Requests with one beginning arrive together: the target reads it once, and so does the head."""
    folder = head_files.eagle(tmp_path / "head")
    begin, params = [(5 * i) % 90 + 3 for i in range(40)], SamplingParams(max_tokens=10)
    prompts = [[*begin, token, token + 1] for token in (40, 50, 60)]
    alone, drafts = [], []
    for together in (False, True):
        drafter = build_drafter(f"eagle:{folder}", {}, context(target))
        engine = oracle.engine(target, drafter, draft_tokens=6)
        waves = [prompts] if together else [[prompt] for prompt in prompts]
        for wave in waves:
            requests = [engine.submit(prompt, params, frozenset()) for prompt in wave]
            while not engine.idle:
                engine.step()
                assert not any(state.shift for state in drafter._states.values())
                drafter._cache.check_integrity()
            alone += [] if together else requests
        drafts.append([r.stats.accepted for r in (requests if together else alone)])
        assert engine._scheduler._cache.reused == 2 * (len(begin) - 1)
    assert drafts[0] == drafts[1]


class Late(FixedPlanner):
    """Lets drafts begin after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(6)
        self._left = steps

    def plan(self, requests):
        self._left -= 1
        return super().plan(requests) if self._left < 0 else [StepPlan(0, "not yet") for _ in requests]


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_rows_are_computed_when_a_draft_needs_them(layout, target, tmp_path, monkeypatch):
    """Nothing before; then all that has waited, in chunks, from which the same drafts follow; and what waits
    stays below a limit."""
    monkeypatch.setattr(feature, "_CHUNK", 7)
    if layout == "eagle":
        folder = head_files.eagle(tmp_path / "head")
    else:
        folder = head_files.eagle3(tmp_path / "head", layout)
    kind = "eagle" if layout == "eagle" else "eagle3"
    prompts = [[(7 * i + s) % 90 + 3 for i in range(n)] for s, n in ((0, 40), (1, 3), (2, 19))]
    kept = []
    for most, late in ((4096, 0), (4096, 8), (10, 8)):
        monkeypatch.setattr(feature, "_MOST", most)
        drafter = build_drafter(f"{kind}:{folder}", {}, context(target))
        engine = oracle.engine(target, drafter, draft_tokens=6, prefill_chunk=9)
        engine.planner = Late(late + 12)
        passes: list[int] = []
        forward = drafter.runner.forward
        monkeypatch.setattr(
            drafter.runner,
            "forward",
            lambda batch, x, f=forward, n=passes: (n.append(len(x)), f(batch, x))[1],
        )
        requests = [engine.submit(p, SamplingParams(max_tokens=40), frozenset()) for p in prompts]
        for _ in range(late + 12):
            engine.step()
            assert all(s.unread <= most + 9 for s in drafter._states.values())
        assert bool(passes) == (most == 10), "nothing was drafted yet"
        while not engine.idle:
            engine.step()
        drafter._cache.check_integrity()
        plain = oracle.run(oracle.engine(target, "none"), prompts, SamplingParams(max_tokens=40))
        assert [r.output_ids for r in requests] == [r.output_ids for r in plain]
        assert max(passes) <= 3 * 9
        kept.append([r.stats.accepted_at for r in requests])
    assert kept[1] == kept[2]
    assert kept[0] != kept[1], "eight steps more without drafts"


@pytest.mark.parametrize("limit", [40, 64])
def test_a_head_with_a_short_context_stops_and_the_answer_goes_on(limit, decoder, tmp_path):
    """Far beyond the head's context: no drafts, no states kept, nothing written outside its range."""
    target = decoder("llama", **head_files.TARGET, max_position_embeddings=1200)
    folder = head_files.eagle(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": limit}))
    drafter = build_drafter(f"eagle:{folder}", {}, DrafterContext(target, None, 1400))
    engine = oracle.engine(target, drafter, draft_tokens=6, kv_slots=1400)
    requests = [
        engine.submit(p, SamplingParams(max_tokens=n), frozenset())
        for p, n in zip(PROMPTS, (620, 20, 9, 600), strict=True)
    ]
    while not engine.idle:
        engine.step()
        drafter._cache.check_integrity()
        assert all(state.unread <= limit for state in drafter._states.values())
    plain = oracle.engine(target, "none", kv_slots=1400)
    wanted = [
        oracle.run(plain, [p], SamplingParams(max_tokens=n))[0]
        for p, n in zip(PROMPTS, (620, 20, 9, 600), strict=True)
    ]
    assert [r.output_ids for r in requests] == [r.output_ids for r in wanted]
    assert requests[0].stats.drafts > 0


def test_medusa_waits_for_the_whole_prompt(target, tmp_path):
    folder = head_files.medusa(tmp_path / "head", "v1.0")
    drafter = build_drafter(f"medusa:{folder}", {}, context(target))
    engine = oracle.engine(target, drafter, draft_tokens=4, prefill_chunk=4)
    engine.submit(PROMPTS[2], SamplingParams(max_tokens=4), frozenset())
    engine.step()
    engine.step()
    engine.step()
    assert engine.stats.drafted == 0, "eleven tokens in chunks of four: no state of the last one before"
    engine.step()
    assert engine.stats.drafted > 0


def test_what_trainers_leave_beside_the_weights_is_not_read(target, tmp_path):
    folder = head_files.eagle(tmp_path / "head")
    for name in ("training_args.bin", "optimizer.bin", "scheduler.pt", "rng_state.pt"):
        torch.save({"step": 3}, folder / name)
    build_drafter(f"eagle:{folder}", {}, context(target))
    tensors = torch.load(folder / "pytorch_model.bin")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    build_drafter(f"eagle:{folder}", {}, context(target))  # a file of an old torch
    for content in (b"", b"\x80garbage"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match="damaged or truncated") as error:
            build_drafter(f"eagle:{folder}", {}, context(target))
        assert "weights_only" not in error.value.message


def test_auto_goes_without_heads_that_do_not_load(model_folder, tmp_path, caplog):
    from foretell.drafters.suffix import SuffixDrafter

    surprise = {"model.mtp_layers.0.surprise.weight": torch.zeros(3)}
    model, folder = mimo_model(model_folder, tmp_path, surprise)
    assert isinstance(build_drafter("auto", {}, DrafterContext(model, None, 256, folder)), SuffixDrafter)
    assert "surprise" in caplog.text
    with pytest.raises(InputError, match="surprise"):
        build_drafter("mtp", {}, DrafterContext(model, None, 256, folder))


def test_heads_inside_the_targets_checkpoint(decoder, model_folder, tmp_path):
    """A MiMo model: Qwen2's graph and its module in one folder; the decoder leaves the module alone."""
    model, folder = mimo_model(model_folder, tmp_path)
    drafter = build_drafter("mtp", {}, DrafterContext(model, None, 256, folder))
    params = SamplingParams(max_tokens=10)
    for request in oracle.run(oracle.engine(model, drafter), PROMPTS, params):
        assert request.output_ids == oracle.generate(model, request.tokens[: request.prompt_length], params)


def test_inspect_says_what_the_checkpoint_brings_along(model_folder, tmp_path):
    from foretell.heads.medusa import has_medusa
    from foretell.heads.mtp import has_mtp

    base = model_folder("llama", **head_files.TARGET)
    assert not has_mtp(base)
    assert not has_medusa(base)
    assert has_mtp(head_files.mimo(tmp_path / "mimo"))
    assert has_medusa(head_files.medusa(tmp_path / "medusa", "v1.0"))


def test_auto_uses_the_module_that_the_model_brought_along(model_folder, tmp_path):
    from foretell.drafters.combine import CombinedDrafter

    model, folder = mimo_model(model_folder, tmp_path)
    drafter = build_drafter("auto", {}, DrafterContext(model, None, 256, folder))
    assert isinstance(drafter, CombinedDrafter)
    assert drafter.needs.last_hidden
    params = SamplingParams(max_tokens=10)
    for request in oracle.run(oracle.engine(model, drafter), PROMPTS, params):
        assert request.output_ids == oracle.generate(model, request.tokens[: request.prompt_length], params)
