"""Self-speculation and the lossless hierarchy: plain decoding's tokens, whatever few keys let through; drafts
that are exact samples; an inner drafter that is never out of step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretell.drafters import DrafterContext, build_drafter
from foretell.drafters.sparse_target import Inner, SparseTargetDrafter
from foretell.engine.verification import KeyedDraws
from foretell.noise import Stream
from foretell.sampling import Sampler
from foretell.sparse import KV_CHOICES, POLICIES, KVReader
from foretell.types import NO_NEEDS, SamplingParams, StepPlan
from foretell.verify import RULES
from tests import head_files, oracle
from tests.enumerate import Script, ScriptedRows, all_runs
from tests.test_sparse_decoding import GREEDY, LONG, SEEDED

LOSSY = [name for name in KV_CHOICES if name != "full"]
PENALISED = SEEDED.replace(repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=9, ignore_eos=False)
SETTINGS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
ENDS = frozenset([2, 11, 30, 31])


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama")


@pytest.fixture(scope="module")
def answers(target):
    return {
        name: [oracle.generate(target, p, params, ENDS) for p in LONG] for name, params in SETTINGS.items()
    }


@pytest.fixture
def drafter(decoder, target):
    """name -> a drafter; "answers" is right most of the time, so that inner drafts really are accepted"""

    def make(name: str):
        if name == "draft":
            return oracle.draft_model(decoder("llama", hidden_size=16, num_hidden_layers=1), target)
        return oracle.draft_model(target, target, width=2) if name == "perfect" else name

    return make


@pytest.mark.parametrize("kv", LOSSY)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_policy_is_lossless_below_a_full_pass(kv, setting, target, drafter, answers):
    """Alone, as one batch, again with prefixes left behind; few keys of many, and a round longer than an
    inner draft."""
    engine = oracle.engine(
        target, drafter("perfect"), kv=kv, kv_budget=12, lossless=True, draft_tokens=9, prefill_chunk=32
    )
    alone = [oracle.run(engine, [p], SETTINGS[setting], ENDS)[0] for p in LONG]
    batch = oracle.run(engine, LONG, SETTINGS[setting], ENDS)
    again = oracle.run(engine, LONG[::-1], SETTINGS[setting], ENDS)[::-1]
    for requests in (alone, batch, again):
        assert [r.output_ids for r in requests] == answers[setting]
        assert all(r.lossless for r in requests)
    assert engine.stats.accepted > 0
    assert engine.stats.accepted < engine.stats.drafted, "few keys are sometimes wrong, or nothing was tested"


def test_a_round_alone_selects_by_what_the_last_one_looked_at(target):
    """One round late, over the history of that time; nothing where there was no round."""
    reader = KVReader(POLICIES["dustin"], 12, target.num_layers)
    drafter = SparseTargetDrafter(target, reader)
    engine = oracle.engine(target, drafter, draft_tokens=3)
    request = engine.submit(LONG[0], GREEDY, frozenset())
    given, select = [], reader.select
    reader.select = lambda *args: (given.append(args[3]), select(*args))[1]
    engine.step()
    engine.step()
    length = request.lease.length
    (_,) = drafter.propose([request], engine.planner.plan([request]))
    looked_N = drafter.draft_attention(request, length)
    drafter._rounds.clear()
    engine.step()
    before = drafter._looked[request.id]
    assert given[0] is None, "the first round has none before it"
    assert given[1].count_nonzero() == len(LONG[0])
    torch.testing.assert_close(before, looked_N)
    engine.step()
    torch.testing.assert_close(given[-1][:length], looked_N)
    assert len(given[-1]) > length
    assert not given[-1][length:].any()
    engine.abort(request)
    assert not drafter._looked


@pytest.mark.parametrize("name", ["draft", "perfect", "ngram", "suffix", "lookahead", "none"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_inner_drafter_keeps_in_step(name, setting, target, drafter, answers):
    engine = oracle.engine(target, drafter(name), kv="dustin", kv_budget=16, lossless=True, draft_tokens=7)
    for prompts in (LONG, LONG[::-1]):
        requests = oracle.run(engine, prompts, SETTINGS[setting], ENDS)
        wanted = answers[setting] if prompts is LONG else answers[setting][::-1]
        assert [r.output_ids for r in requests] == wanted


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "mtp", "suffix+eagle3"])
def test_heads_keep_in_step_below(name, decoder, tmp_path):
    """Drafters that read the target's states get those of passes over few keys, and begin again where tokens
    are taken back."""
    target = decoder("llama", **head_files.TARGET)
    folder = {
        "medusa": lambda: head_files.medusa(tmp_path, "v1.0"),
        "eagle": lambda: head_files.eagle(tmp_path),
        "eagle3": lambda: head_files.eagle3(tmp_path, "speculators"),
        "mtp": lambda: head_files.mimo(tmp_path),
    }[name.split("+")[-1]]()
    inner = build_drafter(f"{name}:{folder}", {}, DrafterContext(target, None, 512))
    engine = oracle.engine(target, inner, kv="dustin", kv_budget=10, lossless=True, draft_tokens=12)
    wanted = [oracle.generate(target, prompt, PENALISED, ENDS) for prompt in LONG]
    for _ in range(2):
        assert [r.output_ids for r in oracle.run(engine, LONG, PENALISED, ENDS)] == wanted


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["draft", "ngram", "none"])
def test_other_rules_are_plain_when_greedy_and_repeat_under_a_seed(rule, name, target, drafter, answers):
    def engine():
        return oracle.engine(
            target, drafter(name), rule=rule, kv="snapkv", kv_budget=12, lossless=True, draft_tokens=7
        )

    requests = oracle.run(engine(), LONG, GREEDY, ENDS)
    assert [r.output_ids for r in requests] == answers["greedy"]
    first, second = (oracle.run(engine(), LONG, SEEDED, ENDS) for _ in range(2))
    assert [r.output_ids for r in first] == [r.output_ids for r in second]


def test_a_history_that_fits_is_drafted_for_directly(target, drafter):
    """There is no middle level then: the inner drafter's trees come to the full pass, siblings and all."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for lossless in (False, True):
        engine = oracle.engine(
            target, drafter("perfect"), kv="dustin", kv_budget=90, lossless=lossless, draft_tokens=6
        )
        (request,) = oracle.run(engine, [LONG[2]], params)
        assert request.stats.drafts == 3
        assert request.stats.drafted > request.stats.accepted, "leaves beside the chain"


def test_the_full_pass_writes_all_keys_anew(target, drafter):
    """After an answer, the cache holds bit by bit what plain decoding's holds."""
    keys = []
    for kv in ("full", "streaming"):
        engine = oracle.engine(
            target,
            drafter("draft") if kv != "full" else "none",
            kv=kv,
            kv_budget=8,
            lossless=True,
            draft_tokens=6,
        )
        request = engine.submit(LONG[1], GREEDY, frozenset())
        while request.emitted < 15:
            engine.step()
        lease = request.lease
        count = len(LONG[1]) + 13
        keys.append(engine.cache.arena.values_LKSD[:, :, lease.start : lease.start + count].clone())
        engine.abort(request)
    assert torch.equal(*keys)


class _ScriptedLevels:
    """One round of draft model, target with few keys, and full pass, after a real prompt; every draw of all
    three is scripted."""

    def __init__(self, target, other, rule: str, inner: bool, monkeypatch) -> None:
        self._rule, self._target = RULES[rule], target
        reader = KVReader(POLICIES["dustin"], 4, target.num_layers)
        level = Inner(oracle.draft_model(other, target), self._judge, False, True) if inner else None
        self.drafter = SparseTargetDrafter(target, reader, level)
        engine = oracle.engine(target, self.drafter, rule=rule, draft_tokens=2)
        params = SamplingParams(max_tokens=8, temperature=1.1, top_k=3, seed=1, ignore_eos=True)
        self.request = engine.submit([3, 1, 4, 1, 0, 2, 3, 3, 2], params, frozenset())
        self.script = Script([])
        monkeypatch.setattr(Sampler, "draw", self._draw)
        engine.planner.max_draft = 0
        engine.step()
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self.kept_in_the_middle = 0

    def _draw(self, logits_V, ahead, count):
        q_V = self.request.sampler.scores(logits_V, ahead).double().softmax(0)
        return [self.script.pick(q_V.tolist())], q_V.log()

    def _judge(self, sampler, tree, logits_RV, best_R):
        rows = ScriptedRows(sampler, tree, logits_RV, None)
        rows.script, rows.known = self.script, {}
        verdict = self._rule.verify(tree, rows, self.script)
        self.kept_in_the_middle += len(verdict.path)
        return verdict

    def probs(self, path: tuple[int, ...]) -> torch.Tensor:
        """The full target after the request and these tokens."""
        if path not in self._logits:
            self._logits[path] = oracle.logits_after(self._target, [*self.request.tokens, *path])
        return self.request.sampler.probs(self._logits[path], path)

    def selected(self) -> list[int]:
        """What the next round reads."""
        part = self.drafter._begin(self.request, StepPlan(2, "test"))
        self.drafter._rounds.clear()
        return part.selected.tolist()

    def step(self, script: Script) -> tuple[int, ...]:
        self.script = script
        (tree,) = self.drafter.propose([self.request], [StepPlan(2, "test")])
        assert len(tree) == 2
        self.drafter._rounds.clear()
        if self.drafter._inner is not None:
            ahead = self.drafter._ahead[self.request.id]
            self.drafter._retract(self.request, ahead, len(self.request.tokens))
        for path in ((), tree.tokens[:1], tree.tokens):
            self.probs(path)
        logits_RV = torch.stack([self._logits[path] for path in ((), tree.tokens[:1], tree.tokens)])
        rows = ScriptedRows(self.request.sampler, tree, logits_RV, None)
        rows.script, rows.known = script, self._known
        verdict = self._rule.verify(tree, rows, script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("case", ["alone", "alone, having looked ahead", "inner draft"])
def test_all_levels_together_are_exact(rule, case, decoder, monkeypatch):
    """Vocabulary of five, every random decision of every level enumerated: the first two tokens have the
    probability that full decoding gives them."""
    inner = case == "inner draft"
    target = _Worse(decoder("llama", vocab_size=5, num_hidden_layers=2))
    other = decoder("llama", vocab_size=5, hidden_size=16, num_hidden_layers=1)
    world = _ScriptedLevels(target, other, rule, inner, monkeypatch)
    if case == "alone, having looked ahead":
        plain = world.selected()
        world.drafter._looked[world.request.id] = torch.arange(9).roll(3).float()
        assert world.selected() != plain
    emitted = all_runs(world.step)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-9)
    assert max(map(len, emitted)) == 3, "whole rounds are accepted too"
    assert bool(world.kept_in_the_middle) == inner
    made = torch.zeros(5, 5, dtype=torch.float64)
    for tokens, chance in emitted.items():
        if len(tokens) == 1:
            made[tokens[0]] += chance * world.probs(tokens)
        else:
            made[tokens[0], tokens[1]] += chance
    wanted = torch.stack([world.probs(())[first] * world.probs((first,)) for first in range(5)])
    torch.testing.assert_close(made, wanted, atol=1e-9, rtol=0)


class _Worse:
    """A model whose passes over few keys are far off, more than a tiny model's would be."""

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, needs=NO_NEEDS):
        output = self._model.forward(batch, needs)
        if all(segment.selected is None for _, segment in batch.segments):
            return output
        return replace(output, logits_RV=output.logits_RV.roll(1, -1))


def _draws_used(target, inner, rule: str, monkeypatch) -> list[tuple[int, ...]]:
    """Every random decision of one answer under this rule, by what it is keyed with: (seed, place, ...)."""
    used: list[tuple[int, ...]] = []

    class Noted(KeyedDraws):
        def accept(self, probability, depth, node):
            used.append((Stream.ACCEPT, self._seed, self._position, node))
            return super().accept(probability, depth, node)

        def sample(self, weights_V, depth):
            used.append((Stream.RESIDUAL, self._seed, self._position + depth))
            return super().sample(weights_V, depth)

    draw = Sampler.draw

    def noted(sampler, logits_V, ahead, count):
        used.append((Stream.DRAFT, sampler.seed, sampler._draft_place(len(ahead))))
        return draw(sampler, logits_V, ahead, count)

    monkeypatch.setattr("foretell.engine.verification.KeyedDraws", Noted)
    monkeypatch.setattr(Sampler, "draw", noted)
    engine = oracle.engine(
        _Worse(target), inner, rule=rule, kv="streaming", kv_budget=4, lossless=True, draft_tokens=5
    )
    oracle.run(engine, [LONG[2]], SEEDED)
    return used


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["draft", "none"])
def test_no_draw_is_used_twice(rule, name, target, drafter, monkeypatch):
    """Not by two levels, and not by two rounds; with levels that share a seed, as a control, some are."""
    used = _draws_used(target, drafter(name), rule, monkeypatch)
    assert len(used) > 50
    assert len(set(used)) == len(used)
    if name != "none":
        monkeypatch.setattr("foretell.drafters.sparse_target.make_key", lambda seed, *_: seed << 1)
        shared = _draws_used(target, drafter(name), rule, monkeypatch)
        assert len(set(shared)) < len(shared)
