"""The compiled kernels: equal to torch, and each row the same bits whatever runs beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretell.attention import Segment, pack
from foretell.cache import KVArena
from foretell.kernels import HeadSpec, TorchKernels, native_kernels
from foretell.kernels.build import BuildError
from foretell.models.linear import choose_kernel
from foretell.models.linear import pack as pack_linear

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def native():
    kernels = native_kernels()
    assert kernels is not None, "no C compiler: `pip install foretell[compiler]`"
    return kernels


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 32), (50, 40), (960, 576), (576, 1536)])
def test_linear_is_row_exact_and_right(outputs, inputs, dtype, threads):
    torch.manual_seed(outputs)
    weight, bias, x = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs), torch.randn(150, inputs)
    linear = pack_linear(weight, bias)
    assert linear.kernel == "panels"
    wide = pack_linear(weight.float(), bias)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(alone, F.linear(x, weight.float(), bias), atol=2e-3, rtol=1e-4)
    for rows in (2, 3, 5, 6, 7, 8, 13, 31, 128, 129, 150):
        assert torch.equal(linear(x[:rows]), alone[:rows]), f"{rows} rows differ from one at a time"
        assert torch.equal(wide(x[:rows]), alone[:rows]), "16-bit weights differ from the same in fp32"


def rounded(x: torch.Tensor, *, by_inverse: bool) -> torch.Tensor:
    """What 8 bits make of the last dimension, in blocks of 64; the rounding itself in fp32, as the kernels
    do it."""
    blocks = F.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    most = blocks.abs().amax(-1, keepdim=True)
    scale = most / 127
    whole = blocks * (127 / most).nan_to_num(posinf=0) if by_inverse else blocks / scale.clamp(min=1e-38)
    return (whole.round().double() * scale.double()).flatten(-2)[..., : x.shape[-1]]


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (50, 40), (960, 576), (576, 1536), (16, 200)])
def test_int8_linear_is_row_exact_and_right(outputs, inputs, threads):
    """Rows are bitwise equal for every number of rows: activations are rounded by their own row alone."""
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    x = torch.randn(150, inputs) * torch.logspace(-3, 3, 150)[:, None]  # rows of very different size
    x[7] = 0
    linear = pack_linear(weight, bias, weights="int8")
    assert (linear.kernel, linear.row_exact) == ("panels8", True)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 5, 6, 7, 8, 13, 31, 128, 129, 150):
        assert torch.equal(linear(x[:rows]), alone[:rows]), f"{rows} rows differ from one at a time"
    wanted = rounded(x, by_inverse=True) @ rounded(weight, by_inverse=False).T + bias.double()
    error = (alone.double() - wanted).abs() / (wanted.abs() + x.abs().amax(1, keepdim=True))
    assert float(error.max()) < 1e-5, "it is the product of the rounded values"
    true = x.double() @ weight.double().T + bias.double()
    relative = (alone.double() - true).norm(dim=1) / true.norm(dim=1)
    assert float(relative.max()) < 0.02


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_int8_shows_what_is_not_finite(bad):
    from foretell.errors import InputError

    linear = pack_linear(torch.randn(32, 100), weights="int8")
    x = torch.randn(3, 100)
    x[1, 70] = bad
    out = linear(x)
    assert bool(torch.isfinite(out[[0, 2]]).all())
    assert not bool(torch.isfinite(out[1]).any()), "a damaged row must not look healthy"
    weight = torch.randn(32, 100)
    weight[3, 5] = bad
    with pytest.raises(InputError, match="not finite"):
        pack_linear(weight, weights="int8")


def test_weights_that_cannot_be_had_are_refused(monkeypatch):
    from foretell.errors import InputError

    weight = torch.randn(16, 64)
    with pytest.raises(InputError, match="must be one of stored, fp32, fp16, int8"):
        pack_linear(weight, weights="int4")
    with pytest.raises(InputError, match="are for the CPU"):
        pack_linear(weight, dtype=torch.bfloat16, weights="int8")
    monkeypatch.setattr("foretell.models.linear.native_kernels", lambda: None)
    with pytest.raises(InputError, match="need the compiled kernels"):
        pack_linear(weight, weights="int8")


def test_linear_without_compiler_uses_onednn_and_is_row_exact(monkeypatch):
    monkeypatch.setattr("foretell.models.linear.native_kernels", lambda: None)
    assert choose_kernel(CPU, torch.float32) == "onednn"
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(40, 64)
    linear = pack_linear(weight, bias)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    assert all(torch.equal(linear(x[:rows]), alone[:rows]) for rows in (2, 5, 8, 40))


def test_add_norm_equals_torch_row_by_row(native, threads):
    torch.manual_seed(0)
    residual, delta, weight = torch.randn(70, 576), torch.randn(70, 576), torch.rand(576)
    x = residual.clone()
    out = native.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, residual + delta)
    torch.testing.assert_close(out, F.rms_norm(residual + delta, (576,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    again = torch.cat(
        [native.add_norm(residual[i : i + 1].clone(), delta[i : i + 1], weight, 1e-5) for i in range(70)]
    )
    assert torch.equal(out, again)
    plain = native.add_norm(residual.clone(), None, weight, 1e-5)
    torch.testing.assert_close(plain, F.rms_norm(residual, (576,), weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_silu_mul_equals_torch(native, threads):
    gate_up = torch.cat([torch.linspace(-120, 120, 1536), torch.linspace(1, 2, 1536)]).repeat(9, 1)
    out = native.silu_mul(gate_up)
    torch.testing.assert_close(out, F.silu(gate_up[:, :1536]) * gate_up[:, 1536:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_equals_torch(native, with_norm):
    torch.manual_seed(0)
    spec = HeadSpec(heads=6, kv_heads=2, dim=16, scale=0.25)
    qkv = torch.randn(11, (6 + 4) * 16)
    angle = torch.arange(64).float()[:, None] * torch.rand(8)
    table, position = (angle.cos(), angle.sin()), torch.randint(0, 64, (11,))
    norms = (torch.rand(16), torch.rand(16)) if with_norm else None
    ours, theirs = qkv.clone(), qkv.clone()
    native.rope(ours, table, position, spec, norms, 1e-6)
    TorchKernels().rope(theirs, table, position, spec, norms, 1e-6)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours[:, 8 * 16 :], qkv[:, 8 * 16 :]), "values are not rotated"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (14, 2, 64), (12, 2, 128), (4, 4, 8), (4, 1, 24)]
)
@pytest.mark.parametrize("past", [0, 3, 127, 300])
def test_attention_rows_are_exact(native, heads, kv_heads, dim, past, threads):
    """24 tokens attended one by one, all at once, and as a tree whose ancestors lie scattered."""
    torch.manual_seed(past)
    spec = HeadSpec(heads, kv_heads, dim, dim**-0.5)
    count = 24
    q, k, v = (
        torch.randn(count, heads, dim),
        torch.randn(count, kv_heads, dim),
        torch.randn(count, kv_heads, dim),
    )
    arena = KVArena(1, kv_heads, dim, 512, torch.float32, CPU)
    arena.keys_LKSD[:, :, :past] = torch.randn(1, kv_heads, past, dim)
    arena.values_LKSD[:, :, :past] = torch.randn(1, kv_heads, past, dim)

    def run(rows, segment):
        batch = pack([segment], arena)
        return native.attend(q[rows], k[rows], v[rows], arena.layer(0), batch.seen(None), spec)

    alone = torch.cat([run([i], Segment(0, past + i, [0])) for i in range(count)])
    together = run(list(range(count)), Segment(0, past, [0] * count))
    assert torch.equal(together, alone)
    # row 0, then every token of the path preceded by a stranger: ancestors at odd places only
    tokens = [0]
    parents: list[int] = []
    for i in range(1, count):
        above = len(parents) - 1  # the path's last node
        parents += [above if i > 1 else -1, above if i > 1 else -1]
        tokens += [count - i, i]
    tree = run(tokens, Segment(0, past, [0], [0] * len(parents), parents))
    assert torch.equal(tree[0::2], alone), "scattered ancestors change the sums"


def test_missing_compiler_is_named(monkeypatch):
    from foretell.kernels import build

    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(BuildError, match="no C compiler"):
        build.library()


def test_failing_compiler_is_reported(monkeypatch, tmp_path):
    from foretell.kernels import build

    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BuildError, match="failed"):
        build.library()
    assert not list((tmp_path / "kernels").iterdir()), "nothing half-built is left"


@pytest.mark.parametrize(
    "name", ["llama", "llama-bias", "qwen3", "mistral", "qwen2-window", "llama-yarn-rope"]
)
@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_a_whole_pass_has_the_bits_of_its_operations(name, weights, model_folder, threads):
    """All layers in one call against the loop in Python: prompts longer than a block of 128 rows, trees,
    several requests, windows, states for draft heads, one thread or two, arenas of different size."""
    from foretell.models.decoder import load_decoder
    from foretell.types import Needs

    model = load_decoder(model_folder(name), torch.float32, CPU, weights=weights)
    assert model._whole is not None
    needs = Needs(last_hidden=True, aux_layers=(0, 2, model.num_layers))
    prompt = [(7 * i) % 90 + 3 for i in range(150)]
    for slots in (300, 200):
        made = []
        for whole in (model._whole, None):
            model._whole, keep = whole, model._whole
            arena = model.new_arena(slots)
            outputs = [model.forward(pack([Segment(0, 0, prompt), Segment(160, 0, [5, 6])], arena), needs)]
            tree = Segment(0, 150, [9], [11, 12, 13, 14], [-1, 0, 0, 2])
            outputs.append(model.forward(pack([tree, Segment(160, 2, [8])], arena), needs))
            made.append((outputs, arena))
            model._whole = keep
        for one, loop in zip(made[0][0], made[1][0], strict=True):
            assert torch.equal(one.logits_RV, loop.logits_RV)
            assert torch.equal(one.hidden_TW, loop.hidden_TW)
            assert all(torch.equal(one.aux_TW[key], loop.aux_TW[key]) for key in needs.aux_layers)
        assert torch.equal(made[0][1].keys_LKSD, made[1][1].keys_LKSD)
        assert torch.equal(made[0][1].values_LKSD, made[1][1].values_LKSD)


@pytest.mark.parametrize("size", [1, 5, 8, 1000, 5120])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_top_is_sorted_normalised_and_stable(native, size, count):
    """Against a stable sort and a softmax in double precision; many equal scores, some of them -inf."""
    chance = torch.Generator().manual_seed(size)
    score_V = (torch.randn(size, generator=chance) * 20).round() / 4
    score_V[torch.rand(size, generator=chance) < 0.2] = -torch.inf
    score_V[size // 2] = 30.0
    count = min(count, size)
    log_prob_N, id_N = native.top(score_V, count)
    ordered = score_V.double().log_softmax(0).sort(descending=True, stable=True)
    assert id_N.tolist() == ordered.indices[:count].tolist()
    torch.testing.assert_close(log_prob_N.double(), ordered.values[:count], atol=1e-5, rtol=1e-6)
