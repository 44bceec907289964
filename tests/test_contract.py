"""What every drafter must keep, over the whole registry: answers are plain decoding's, drafts are judged
exactly, and nothing is left behind."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch

from foretell.drafters import DRAFTERS, build_drafter
from foretell.drafters.base import DrafterContext
from foretell.drafters.combine import CombinedDrafter
from foretell.drafters.suffix import SuffixDrafter, SuffixOptions
from foretell.sampling import Sampler
from foretell.types import DraftTree, SamplingParams, StepPlan
from foretell.verify import RULES
from tests import head_files, oracle
from tests.enumerate import Script, ScriptedRows, all_runs

PROMPTS = oracle.PROMPTS
SETTINGS = {
    "greedy": SamplingParams(max_tokens=14),
    "seeded": SamplingParams(max_tokens=14, temperature=0.9, top_p=0.95, seed=7),
    "penalised": SamplingParams(
        max_tokens=14, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=5, seed=9
    ),
}
ENDS = frozenset([2, 11, 30, 31])
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


@pytest.fixture(scope="module")
def make(target, decoder, tmp_path_factory):
    """case -> a new drafter"""
    root = tmp_path_factory.mktemp("heads")
    folders = head_files.every_kind(root)
    (root / "tree.json").write_text(json.dumps([[0], [1], [0, 0], [1, 0], [0, 0, 0]]))
    other = decoder("llama", hidden_size=16, num_hidden_layers=1)

    def build(case: str, *, learning: bool = True):
        spec, *options = case.split()
        values = dict(option.split("=") for option in options)
        if spec == "draft":
            return oracle.draft_model(other, target, width=int(values.get("width", 1)))
        if spec == "perfect":
            return oracle.draft_model(target, target)
        if spec == "suffix+draft":
            suffix = SuffixDrafter(SuffixOptions(pool_mb=64 if learning else 0))
            return CombinedDrafter(suffix, oracle.draft_model(target, target))
        for name, folder in folders.items():
            spec = f"{spec}:{folder}" if spec.split("+")[-1] == name else spec
        values = {k: str(root / "tree.json") if v == "FILE" else v for k, v in values.items()}
        return build_drafter(spec, values, DrafterContext(target, None, 512, learning=learning))

    return build


CASES = [
    "auto",
    "none",
    "ngram min_n=1 branches=3",
    "suffix",
    "suffix min_prob=0.01 factor=9",
    "lookahead",
    "lookahead window=2 ngram=3 guesses=2 prompt=no",
    "medusa",
    "medusa tree=FILE",
    "eagle",
    "eagle tree=eagle1",
    "eagle3 depth=4 top_k=3",
    "eagle3 min_prob=0.02 tree=FILE",
    "mtp",
    "draft",
    "draft width=3",
    "perfect",
    "self kv=snapkv budget=4",
    "self kv=dustin budget=6",
    "suffix+self kv=quest budget=5",
    "suffix+draft",
    "suffix+eagle3",
    "suffix+lookahead",
]


# drafters whose tokens are drawn where a rule allows it
SAMPLED = ("draft", "perfect", "suffix+draft", "self", "suffix+self")


def test_every_drafter_has_a_case():
    named = {part for case in CASES for part in case.split()[0].split("+")}
    assert set(DRAFTERS) <= named


@pytest.fixture(scope="module")
def answers(target):
    made = {}

    def get(setting: str, limit: int = 14) -> list[list[int]]:
        if (setting, limit) not in made:
            params = SETTINGS[setting].replace(
                max_tokens=limit, min_tokens=0 if limit < 5 else SETTINGS[setting].min_tokens
            )
            made[setting, limit] = [oracle.generate(target, p, params, ENDS) for p in PROMPTS]
        return made[setting, limit]

    return get


def nothing_left(drafter) -> None:
    """No state of a request outlives it."""
    parts = [drafter._first, drafter._second] if isinstance(drafter, CombinedDrafter) else [drafter]
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, dict):
                assert not value, f"{type(part).__name__}.{name}"
        if hasattr(part, "_cache"):
            part._cache.check_integrity()
            assert not part._cache._live


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_plain_decodings(case, setting, make, target, answers):
    """Alone, then as one batch, then again with prefix hits; with a budget that ends in the middle of a
    tree."""
    for budget in (7, 1) if setting == "greedy" else (7,):
        drafter = make(case)
        engine = oracle.engine(target, drafter, draft_tokens=budget)
        alone = [oracle.run(engine, [p], SETTINGS[setting], ENDS)[0] for p in PROMPTS]
        batch = oracle.run(engine, PROMPTS, SETTINGS[setting], ENDS)
        again = oracle.run(engine, PROMPTS[::-1], SETTINGS[setting], ENDS)[::-1]
        for requests in (alone, batch, again):
            assert [r.output_ids for r in requests] == answers(setting)
        nothing_left(drafter)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_other_rules_are_plain_decoding_when_greedy(case, rule, make, target, answers):
    engine = oracle.engine(target, make(case), rule=rule, draft_tokens=7)
    requests = oracle.run(engine, PROMPTS, SETTINGS["greedy"], ENDS)
    assert [r.output_ids for r in requests] == answers("greedy")
    assert all(r.lossless == (rule != "typical") for r in requests)


@pytest.mark.parametrize("case", CASES)
def test_limits(case, make, target, answers):
    """No budget; more budget than is left; one token; requests that end beside others; an end token inside
    a draft (ENDS are likely in these answers)."""
    drafter = make(case)
    off = oracle.engine(target, drafter, draft_tokens=0)
    assert [r.output_ids for r in oracle.run(off, PROMPTS, SETTINGS["greedy"], ENDS)] == answers("greedy")
    assert off.stats.drafted == 0
    engine = oracle.engine(target, drafter, draft_tokens=9)
    for limit in (1, 2, 3):
        params = SETTINGS["greedy"].replace(max_tokens=limit)
        requests = oracle.run(engine, PROMPTS, params, ENDS)
        assert [r.output_ids for r in requests] == [a[:limit] for a in answers("greedy")]
    each = [SETTINGS["seeded"].replace(max_tokens=n) for n in (1, 14, 3, 9)]
    requests = oracle.run(engine, PROMPTS, each, ENDS)
    assert [r.output_ids for r in requests] == [
        a[: p.max_tokens] for a, p in zip(answers("seeded"), each, strict=True)
    ]
    nothing_left(drafter)


@pytest.mark.parametrize("case", CASES)
def test_abort_in_the_middle_leaves_the_others_alone(case, make, target, answers):
    drafter = make(case)
    engine = oracle.engine(target, drafter, draft_tokens=7)
    requests = [engine.submit(p, SETTINGS["seeded"], ENDS) for p in PROMPTS]
    for _ in range(2):
        engine.step()
    engine.abort(requests[1])
    while not engine.idle:
        engine.step()
        engine.cache.check_integrity()
    kept = [0, 2, 3]
    assert [requests[i].output_ids for i in kept] == [answers("seeded")[i] for i in kept]
    nothing_left(drafter)


@pytest.mark.parametrize("case", CASES)
def test_long_prompts_in_chunks_with_drafting_switched_on_and_off(case, make, target):
    """Prompts of several chunks; a planner that changes its mind every step."""
    prompt = [(i * i + 3) % 90 + 3 for i in range(70)]
    params = SamplingParams(max_tokens=24)
    wanted = oracle.generate(target, prompt, params)
    drafter = make(case)
    engine = oracle.engine(target, drafter, draft_tokens=6, prefill_chunk=16)
    request = engine.submit(prompt, params, frozenset())
    step = 0
    while not engine.idle:
        step += 1
        engine.planner.max_draft = 6 if step % 3 else 0
        engine.step()
    assert request.output_ids == wanted
    nothing_left(drafter)


class _Spy:
    """Keeps the trees of a drafter with the tokens that they follow."""

    def __init__(self, drafter) -> None:
        self._drafter = drafter
        self.trees: list[tuple[list[int], DraftTree]] = []

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, requests, plans):
        trees = self._drafter.propose(requests, plans)
        self.trees += [(list(r.tokens), t) for r, t in zip(requests, trees, strict=True) if len(t)]
        return trees


PROCESSED = SamplingParams(
    max_tokens=12, temperature=0.9, top_p=0.98, logit_bias={4: 1.0}, frequency_penalty=0.3, seed=3
)


@pytest.mark.parametrize("case", [c for c in CASES if c != "none"])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_real_trees_are_judged_exactly(case, rule, make, target):
    """Every random decision on trees that the drafter really made, enumerated: the probability of every
    path of the tree, and of every token after it, is the target's."""
    if rule != "coupled" and case.split()[0] in SAMPLED:
        pytest.skip("sampled drafts are enumerated with their draws below")
    spy = _Spy(make(case))
    oracle.run(oracle.engine(target, spy, rule=rule, draft_tokens=6), PROMPTS, PROCESSED, ENDS)
    trees = sorted(spy.trees, key=lambda found: -len(set(found[1].parents)))
    assert trees
    for tokens, tree in trees[:3]:
        assert tree.log_q is None
        _check_exact(tokens, tree, rule, target)


def _target_rows(tokens, tree, target) -> tuple[Sampler, torch.Tensor]:
    paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(-1, len(tree))]
    rows = [oracle.logits_after(target, [*tokens, *path]) for path in paths]
    return Sampler(PROCESSED, tokens, len(tokens) - 2, seed=0, end_ids=ENDS), torch.stack(rows)


def _check_exact(tokens, tree, rule, target) -> None:
    sampler, logits_RV = _target_rows(tokens, tree, target)
    known: dict = {}

    def run(script: Script) -> tuple[int, ...]:
        rows = ScriptedRows(sampler, tree, logits_RV, None)
        rows.script, rows.known = script, known
        verdict = RULES[rule].verify(tree, rows, script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    emitted = all_runs(run)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-9)
    rows = ScriptedRows(sampler, tree, logits_RV, None)
    rows.known = known
    reach = {(): (1.0, -1)}  # tokens of a path -> probability under the target, its node
    for node in range(len(tree)):
        path = tuple(tree.tokens[i] for i in tree.path(node))
        if path not in reach:
            above, parent = reach[path[:-1]]
            reach[path] = (above * float(rows.probs(parent)[path[-1]]), node)
    for path, (probability, node) in reach.items():
        follow = torch.zeros(target.vocab_size, dtype=torch.float64)
        arrived = defaultdict(float)
        for tokens_out, chance in emitted.items():
            if tokens_out[: len(path)] == path and len(tokens_out) > len(path):
                arrived[tokens_out[len(path)]] += chance
            elif tokens_out == path[: len(tokens_out)]:
                # the step ended before: plain decoding goes on from there
                chance *= probability / reach[tokens_out][0] if reach[tokens_out][0] else 0.0
                follow += chance * rows.probs(node)
        for token, chance in arrived.items():
            follow[token] += chance
        torch.testing.assert_close(follow, probability * rows.probs(node), atol=1e-9, rtol=0)


class _ScriptedDrafts:
    """One step of the real draft-model drafter from one place in a text, all its draws scripted."""

    def __init__(self, target, other, rule: str, width: int, monkeypatch) -> None:
        self.prompt = [3, 1, 4]
        self.target, self._rule, self._width = target, rule, width
        self._drafter = oracle.draft_model(other, target, width=width)
        engine = oracle.engine(target, self._drafter, rule=rule)
        params = SamplingParams(max_tokens=8, temperature=1.1, top_k=4, seed=1)
        self.request = engine.submit(self.prompt, params, frozenset())
        self._script = Script([])
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        monkeypatch.setattr(Sampler, "draw", self._draw)

    def _draw(self, logits_V, ahead, count):
        q_V = self.request.sampler.scores(logits_V, ahead).double().softmax(0)
        left_V, drawn = q_V.clone(), []
        for _ in range(min(count, int((q_V > 0).sum()))):
            drawn.append(self._script.pick((left_V / left_V.sum()).tolist()))
            left_V[drawn[-1]] = 0
        return drawn, q_V.log()

    def after(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self._logits:
            self._logits[path] = oracle.logits_after(self.target, [*self.prompt, *path])
        return self._logits[path]

    def step(self, script: Script) -> tuple[int, ...]:
        self._script = script
        self._drafter.start(self.request)
        (tree,) = self._drafter.propose([self.request], [StepPlan(2 * self._width, "test")])
        self._drafter.finish(self.request)
        paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(-1, len(tree))]
        logits_RV = torch.stack([self.after(path) for path in paths])
        rows = ScriptedRows(self.request.sampler, tree, logits_RV, None)
        rows.script, rows.known = script, {}
        verdict = RULES[self._rule].verify(tree, rows, script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("width", [1, 2])
def test_sampled_drafts_are_judged_exactly(rule, width, decoder, monkeypatch):
    """The real draft-model drafter on a vocabulary of five: all its draws and all decisions about them."""
    target = decoder("llama", vocab_size=5, num_hidden_layers=1)
    other = decoder("llama", vocab_size=5, hidden_size=16, num_hidden_layers=1)
    world = _ScriptedDrafts(target, other, rule, width, monkeypatch)
    emitted = all_runs(world.step)
    assert max(map(len, emitted)) == 3, "whole drafts are accepted too"
    sampler = world.request.sampler
    p = {path: sampler.probs(world.after(path), path) for path in [(), *((t,) for t in range(5))]}
    made = torch.zeros(5, 5, dtype=torch.float64)
    for tokens, chance in emitted.items():
        if len(tokens) == 1:
            made[tokens[0]] += chance * p[tokens]
        else:
            made[tokens[0], tokens[1]] += chance
    wanted = torch.stack([p[()][first] * p[first,] for first in range(5)])
    torch.testing.assert_close(made, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c != "none"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_repeat_under_a_seed(case, rule, make, target):
    """Their text depends on the draft, so a draft must not depend on other requests."""
    engine = oracle.engine(target, make(case, learning=False), rule=rule, draft_tokens=6, max_batch=3)
    params = SamplingParams(max_tokens=24, temperature=0.9, top_k=12, seed=3)
    first = [oracle.run(engine, [p], params)[0].output_ids for p in PROMPTS]
    again = [oracle.run(engine, [p], params)[0].output_ids for p in PROMPTS[::-1]][::-1]
    batch = [r.output_ids for r in oracle.run(engine, PROMPTS, params)]
    assert first == again == batch


@pytest.mark.parametrize("case", CASES)
def test_forgetting_makes_the_second_time_like_the_first(case, make, target):
    """Benchmarks repeat prompts: what an earlier answer left must be gone."""
    engine = oracle.engine(target, make(case), draft_tokens=6)
    drafted = []
    for _ in range(2):
        (request,) = oracle.run(engine, [PROMPTS[3]], SETTINGS["greedy"].replace(max_tokens=30))
        drafted.append((request.stats.drafts, request.stats.drafted, request.stats.accepted))
        engine.forget()
    assert drafted[0] == drafted[1]
