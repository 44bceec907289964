"""Processors against transformers', noise against its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import sampling
from foretell.errors import InputError
from foretell.noise import Stream, gumbel, gumbel_tensor, make_key, uniform
from foretell.sampling import Sampler, filter_scores, keyed_argmax, keyed_top
from foretell.types import SamplingParams


def hf_scores(logits: torch.Tensor, history: list[int], params: SamplingParams) -> torch.Tensor:
    """transformers' own processors in its own order."""
    from transformers import generation as hf

    steps = []
    if params.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(hf.MinPLogitsWarper(params.min_p))
    scores = logits[None].clone()
    for step in steps:
        scores = step(torch.tensor([history]), scores)
    return scores[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition=st.sampled_from([1.0, 1.3]),
)
def test_scores_equal_transformers(seed, temperature, top_k, top_p, min_p, repetition):
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition
    )
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 3
    history = [3, 4, 5, 5, 9, 200]
    sampler = Sampler(params, history[:4], 2, seed=0)
    ours, theirs = (
        sampler.scores(logits, history[4:]).softmax(0),
        hf_scores(logits, history, params).softmax(0),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours > 0, theirs > 0)


def test_top_p_beyond_the_first_look():
    """A flat row needs more tokens than the quick look holds."""
    logits = torch.zeros(2000)
    logits[:1000] += 1e-4 * torch.arange(1000)
    kept = int((filter_scores(logits, SamplingParams(temperature=1.0, top_p=0.4)) > -torch.inf).sum())
    mass = logits.double().softmax(0).sort(descending=True).values.cumsum(0)
    assert kept == int((mass < 0.4).sum()) + 1 == 772


def test_ties_are_kept_together():
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    for params in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.8)):
        assert (filter_scores(logits, params) > -torch.inf).tolist() == [True, True, True, True, False]


def test_frequency_and_presence_count_the_output_and_the_hypothetical_prefix():
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.25)
    sampler = Sampler(params, [1, 1, 1, 2, 2], 3, seed=0)
    assert sampler.scores(torch.zeros(5), [2, 4]).tolist() == [0, 0, -1.75, 0, -0.75]


def test_end_tokens_are_held_off_at_every_position():
    sampler = Sampler(SamplingParams(min_tokens=2, temperature=1.0), [9, 9], 2, seed=0, end_ids=[0, 3])
    held = [bool(torch.isinf(sampler.scores(torch.zeros(5), [1] * ahead)[3])) for ahead in range(4)]
    assert held == [True, True, False, False]


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("size", [2, 7, 1000, 151_936])
def test_compiled_argmax_equals_the_definition(size, scale):
    """The compiled search skips most logarithms; it must find what the definition finds."""
    generator = torch.Generator().manual_seed(size)
    for trial in range(4 if size > 10_000 else 40):
        scores = torch.randn(size, generator=generator) * scale
        scores[torch.rand(size, generator=generator) < 0.3] = -torch.inf
        scores[0] = 0.0
        key = make_key(trial, Stream.TARGET, 5)
        wanted = int((scores.double() + gumbel_tensor(key, torch.arange(size))).argmax())
        assert keyed_argmax(scores, key) == wanted
        assert keyed_top(scores, key, 2)[0] == wanted


def test_torch_fallback_draws_the_same(monkeypatch):
    scores = torch.randn(500, generator=torch.Generator().manual_seed(0))
    keys = [make_key(3, Stream.TARGET, position) for position in range(200)]
    compiled = [keyed_argmax(scores, key) for key in keys]
    monkeypatch.setattr(sampling, "native_kernels", lambda: None)
    assert [keyed_argmax(scores, key) for key in keys] == compiled


def test_tensor_noise_equals_scalar_noise():
    for key in (0, 1, (1 << 64) - 1, make_key(7, Stream.DRAFT, 11)):
        tensor = gumbel_tensor(key, torch.tensor([0, 1, 5, 151_935]))
        assert tensor.tolist() == pytest.approx([gumbel(key, i) for i in (0, 1, 5, 151_935)], abs=1e-12)


def test_samples_follow_the_distribution_across_positions_and_seeds():
    """Chi-square with seven degrees of freedom; 24.3 is p = 0.001."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    probs = logits.softmax(0).tolist()
    for keys in (
        [make_key(1, Stream.TARGET, position) for position in range(40_000)],
        [make_key(seed, Stream.TARGET, 1) for seed in range(40_000)],
    ):
        counts = [0] * 8
        for key in keys:
            counts[keyed_argmax(logits, key)] += 1
        chi = sum((n - 40_000 * p) ** 2 / (40_000 * p) for n, p in zip(counts, probs, strict=True))
        assert chi < 24.3


def test_streams_positions_and_seeds_are_unrelated():
    """Correlation of uniforms under neighbouring keys is what independent ones would show."""
    count = 20_000

    def series(seed: int, stream: Stream, shift: int) -> torch.Tensor:
        return torch.tensor([uniform(make_key(seed, stream, i + shift)) for i in range(count)])

    base = series(5, Stream.TARGET, 0)
    assert abs(float(base.mean()) - 0.5) < 4 / math.sqrt(12 * count)
    others = [series(5, stream, 0) for stream in Stream if stream is not Stream.TARGET]
    for other in [series(6, Stream.TARGET, 0), series(5, Stream.TARGET, 1), *others]:
        correlation = float(torch.corrcoef(torch.stack([base, other]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(count)


def test_keys_do_not_collide():
    keys = {make_key(seed, stream, t) for seed in range(40) for stream in Stream for t in range(200)}
    assert len(keys) == 40 * len(Stream) * 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 300),
        ("seed", -1), ("seed", 1 << 63), ("stop", ""), ("stop", ["ok", ""]), ("stop", [-1]),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101}), ("logit_bias", {1: math.nan}),
        ("repetition_penalty", 0), ("frequency_penalty", 3), ("presence_penalty", -3), ("logprobs", -1),
        ("logprobs", 21), ("n", 0),
    ],
)  # fmt: skip
def test_bad_parameters_name_field_value_and_range(field, value):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.message.startswith(field)
    assert "must be" in caught.value.message
    assert "got" in caught.value.message
