"""Every lossless rule leaves the target's distribution as it is: by enumeration, not by sampling.

Vocabularies of three and four, trees of depth two and width two, every processor; and for each fault that was
found in other engines, the proof that this test would see it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from foretell.engine.verification import verify
from foretell.noise import Stream
from foretell.sampling import Sampler
from foretell.types import DraftTree, SamplingParams, chain
from foretell.verify import RULES
from foretell.verify import base as verify_base
from tests.enumerate import Script, World

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
EXACT = 1e-9
VISIBLE = 1e-3

PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.2, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 2.0, 2: -1.5}),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.6),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=1.1),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.3),
    "min-tokens": SamplingParams(temperature=1.0, min_tokens=2),
    "all": SamplingParams(
        temperature=0.9, top_k=3, top_p=0.9, min_p=0.05, logit_bias={1: 0.7}, repetition_penalty=1.2,
        frequency_penalty=0.4, presence_penalty=0.3, min_tokens=1,
    ),
    "greedy": SamplingParams(temperature=0),
}  # fmt: skip
SHAPES = {
    "chain": (1, 1),
    "siblings": (2,),
    "three siblings": (3,),
    "tree": (2, 2),
    "deep": (1, 1, 1),
    "empty": (),
}


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("draft", ["sampled", "chosen"])
@pytest.mark.parametrize("params", PARAMS)
def test_trees_of_depth_and_width_two(rule, draft, params):
    world = World(
        PARAMS[params], draft, SHAPES["tree"], vocab=4 if params == "all" or draft == "chosen" else 3
    )
    assert world.error(lambda script: world.one_step(RULES[rule], script), 3) < EXACT


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("draft", ["sampled", "chosen"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_shape(rule, draft, shape, seed):
    world = World(PARAMS["temperature"], draft, SHAPES[shape], seed, vocab=3 if shape == "tree" else 4)
    assert world.error(lambda script: world.one_step(RULES[rule], script), len(SHAPES[shape]) + 1) < EXACT


def test_acceptance_is_what_theory_says():
    """A chain of one: rejection accepts sum(min(p, q)); block never accepts less than rejection."""
    world = World(PARAMS["temperature"], "sampled", (1, 1), 3)

    def accepted(rule: str) -> list[float]:
        counts = [0.0, 0.0, 0.0]
        waiting: list[list[int]] = [[]]
        while waiting:
            script = Script(waiting.pop())
            counts[len(world.one_step(RULES[rule], script)) - 1] += script.probability
            waiting += script.others
        return counts

    p, q = world.target_probs([]), world.draft_log_q([]).exp()
    assert 1 - accepted("rejection")[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)
    mean = {rule: sum(i * share for i, share in enumerate(accepted(rule))) for rule in LOSSLESS}
    assert mean["block"] >= mean["rejection"] - 1e-12
    assert mean["rejection"] > mean["coupled"], "independent choices meet less often than min(1, p/q)"


def test_typical_acceptance_is_lossy_and_says_so():
    """Seen by the same test that the lossless rules pass; greedy it is plain decoding."""
    world = World(SamplingParams(temperature=1.0), "chosen", (2, 2))
    assert world.error(lambda script: world.one_step(RULES["typical"], script), 3) > VISIBLE
    tree = world.draw_tree(Script([]))
    assert not RULES["typical"].verify(tree, world.rows(tree, Script([])), Script([])).lossless
    greedy = World(SamplingParams(temperature=0), "chosen", (2, 2))
    assert greedy.error(lambda script: greedy.one_step(RULES["typical"], script), 3) < EXACT


def test_typical_acceptance_keeps_the_longest_plausible_path():
    """By hand: p(a) = p(b) = .45 after the root, only b's child is plausible."""
    probs = {-1: [0.45, 0.45, 0.1], 0: [0.9, 0.05, 0.05], 1: [0.6, 0.3, 0.1], 2: [1.0, 0, 0], 3: [0, 1.0, 0]}

    class Target:
        def probs(self, node):
            return torch.tensor(probs[node], dtype=torch.float64)

    tree = DraftTree((0, 1, 1, 1), (-1, -1, 0, 1))
    verdict = RULES["typical"].verify(tree, Target(), None)
    assert (verdict.path, verdict.next_token, verdict.lossless) == ((1, 3), 1, False)


# ---- negative controls: each fault of other engines, injected, is seen ---------------------------


def tv(world: World, step, length: int = 2) -> float:
    return world.error(step, length)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_fault_raw_q_reported(rule):
    """Drawn from the filtered q, reported unfiltered (transformers#47932)."""
    world = World(SamplingParams(temperature=1.0), "sampled", (1,))

    def step(script: Script) -> tuple[int, ...]:
        log_q = world.draft_log_q([])
        kept = log_q.masked_fill(log_q < log_q.topk(2).values[-1], -torch.inf).log_softmax(0)
        token = script.pick(kept.exp().tolist())
        tree = DraftTree((token,), (-1,), (log_q, None))
        verdict = RULES[rule].verify(tree, world.rows(tree, script), script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    assert tv(world, step) > VISIBLE


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_fault_deterministic_draft_judged_as_sampled(rule):
    """The top-1 token with a ratio p/q as if it had been drawn (astronomical#335)."""
    world = World(SamplingParams(temperature=1.0), "sampled", (1,))

    def step(script: Script) -> tuple[int, ...]:
        log_q = world.draft_log_q([])
        tree = chain([int(log_q.argmax())], [log_q])
        verdict = RULES[rule].verify(tree, world.rows(tree, script), script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    assert tv(world, step) > VISIBLE


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_fault_siblings_not_renormalised(rule, monkeypatch):
    """q keeps its mass after a sibling was rejected."""

    def without(q_V, token):
        q_V = q_V.clone()
        q_V[token] = 0
        return q_V

    monkeypatch.setattr(f"foretell.verify.{rule}.without", without)
    world = World(SamplingParams(temperature=1.0), "sampled", (3,))
    assert tv(world, lambda script: world.one_step(RULES[rule], script)) > VISIBLE


def test_fault_rejected_token_replaced_from_p(monkeypatch):
    """The target itself instead of the residual after a rejection (TriForce's middle level)."""
    monkeypatch.setattr("foretell.verify.rejection.residual", lambda p_V, q_V, token: p_V)
    world = World(SamplingParams(temperature=1.0), "sampled", (1,))
    assert tv(world, lambda script: world.one_step(RULES["rejection"], script)) > VISIBLE


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("params", ["top-p", "min-p", "bias", "frequency", "repetition", "min-tokens"])
def test_fault_processors_at_the_bonus_only(rule, params, monkeypatch):
    """Draft positions are judged by unprocessed logits (vLLM#42744, #18902, PR 32642)."""
    world = World(PARAMS[params], "chosen", (1, 1))
    plain = Sampler(SamplingParams(temperature=1.0), world.prompt, len(world.prompt), seed=0)
    real = world.sampler.probs

    def probs(logits_V, ahead=()):
        return real(logits_V, ahead) if len(ahead) == 2 else plain.probs(logits_V, ahead)

    def step(script: Script) -> tuple[int, ...]:
        tree = world.draw_tree(script)
        rows = world.rows(tree, script, faulty=True)
        monkeypatch.setattr(world.sampler, "probs", probs)
        verdict = RULES[rule].verify(tree, rows, script)
        monkeypatch.setattr(world.sampler, "probs", real)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    assert tv(world, step, 3) > VISIBLE


@pytest.mark.parametrize("rule", LOSSLESS)
def test_fault_penalties_with_the_history_of_the_step_start(rule, monkeypatch):
    """Tokens inside the draft are not counted (vLLM#6718)."""
    world = World(SamplingParams(temperature=1.0, frequency_penalty=1.5), "chosen", (1, 1))
    real = world.sampler.probs

    def step(script: Script) -> tuple[int, ...]:
        tree = world.draw_tree(script)
        rows = world.rows(tree, script, faulty=True)
        monkeypatch.setattr(world.sampler, "probs", lambda logits_V, ahead=(): real(logits_V, ()))
        verdict = RULES[rule].verify(tree, rows, script)
        monkeypatch.setattr(world.sampler, "probs", real)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    assert tv(world, step, 3) > VISIBLE


def chi_square(counts: list[int], probs: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, probs, strict=True))


def sampled_counts(residual_stream: Stream, runs: int) -> list[int]:
    """The real sampler, draws and rule on p = (.1, .6, .3), q = (.05, .9, .05)."""
    from foretell.engine.verification import KeyedDraws, Rows
    from foretell.noise import make_key
    from foretell.sampling import keyed_argmax

    class Draws(KeyedDraws):
        def sample(self, weights_V, depth):
            place = self._position + depth
            if residual_stream == Stream.DRAFT:  # the very key that the draft was drawn with
                place = (self._position << 16) + depth
            return keyed_argmax(weights_V.log(), make_key(self._seed, residual_stream, place))

    p, q = torch.tensor([0.1, 0.6, 0.3]).log(), torch.tensor([0.05, 0.9, 0.05]).log()
    params, logits, counts = SamplingParams(temperature=1.0), torch.stack([p, p]), [0, 0, 0]
    for seed in range(runs):
        sampler = Sampler(params, [0], 1, seed, draft_stream=RULES["rejection"].draft_stream)
        drawn, log_q = sampler.draw(q, [], 1)
        tree = chain(drawn, [log_q])
        verdict = RULES["rejection"].verify(tree, Rows(sampler, tree, logits, None), Draws(seed, 1))
        counts[drawn[0] if verdict.path else verdict.next_token] += 1
    return counts


def test_streams_are_independent_and_sharing_one_is_seen():
    """One noise for proposal and recovery biases the output by 0.008 (vLLM PR 47386, PR 54282)."""
    limit = 13.8  # chi-square, two degrees of freedom, p = 0.001
    assert chi_square(sampled_counts(Stream.RESIDUAL, 60_000), [0.1, 0.6, 0.3]) < limit
    assert chi_square(sampled_counts(Stream.DRAFT, 60_000), [0.1, 0.6, 0.3]) > limit


def several_steps(rule: str, runs: int, monkeypatch, *, old_key: bool = False) -> float:
    """Chi-square of three emitted tokens, over as many steps as they take, against the target: the real
    sampler, draws and rule, chains of three drawn from a strange draft."""
    generator = torch.Generator().manual_seed(1)
    p_VV, q_VV = (torch.randn(3, 3, generator=generator) * 1.5 for _ in range(2))
    if old_key:
        monkeypatch.setattr(Sampler, "_draft_place", lambda self, ahead: self.length + ahead)
    made: dict[tuple[int, ...], int] = {}
    for run in range(runs):
        tokens, seed = [0], run * 2654435761
        sampler = Sampler(
            SamplingParams(temperature=1.0), tokens, 1, seed, draft_stream=RULES[rule].draft_stream
        )
        while len(tokens) < 4:
            drawn, log_q = [], []
            for _ in range(3):
                (token,), row = sampler.draw(q_VV[[*tokens, *drawn][-1]], drawn, 1)
                drawn.append(token)
                log_q.append(row)
            rows = p_VV[[tokens[-1], *drawn]]
            verdict = verify(RULES[rule], sampler, chain(drawn, log_q), rows, [0] * 4)
            tokens += [*(drawn[node] for node in verdict.path), verdict.next_token]
        made[tuple(tokens[1:4])] = made.get(tuple(tokens[1:4]), 0) + 1
    probs = p_VV.double().softmax(1)
    chi = 0.0
    for a, b, c in itertools.product(range(3), repeat=3):
        wanted = runs * float(probs[0, a] * probs[a, b] * probs[b, c])
        chi += (made.get((a, b, c), 0) - wanted) ** 2 / wanted
    return chi


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_several_steps_are_exact_too(rule, monkeypatch):
    """A position that is drafted again must be drawn afresh: what was kept of the first draft says
    something about its noise."""
    limit = 54.1  # chi-square, 26 degrees of freedom, p = 0.001
    assert several_steps(rule, 6000, monkeypatch) < limit


def test_fault_a_position_is_drafted_again_with_the_same_noise(monkeypatch):
    assert several_steps("block", 6000, monkeypatch, old_key=True) > 80


def test_control_is_the_real_code():
    """The faults above are injected into names that the rules really use."""
    from foretell.verify import block, rejection

    assert rejection.without is verify_base.without
    assert block.without is verify_base.without
    assert rejection.residual is verify_base.residual
