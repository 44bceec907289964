"""Which levels draft: by simulated costs, where the middle level pays and where it does not; and that the
text does not depend on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from foretell.planner import AdaptivePlanner, CostTable, FixedPlanner, StepReport
from foretell.planner.levels import LevelChoice
from foretell.types import SamplingParams, StepPlan, chain
from tests import oracle
from tests.test_sparse_decoding import GREEDY, LONG, SEEDED

KEPT, DRAFT = 0.7, 4  # the lowest level's tokens: chance of each, and how many


@dataclass
class Request:
    id: int = 0
    remaining: int = 10_000


@dataclass
class World:
    """A hierarchy by its costs, in plain steps over all keys: a pass over few keys, a drafted token, and a
    row more in a full pass; and how often the full pass keeps what few keys let through."""

    few: float
    kept: float
    draft: float = 0.02
    row: float = 0.02

    def planner(self) -> AdaptivePlanner:
        return AdaptivePlanner(CostTable({1: 1.0, 101: 1 + 100 * self.row}), 16, DRAFT)

    def run(self, planner: AdaptivePlanner, steps: int, seed: int = 0) -> list[StepPlan]:
        pick, plans = random.Random(seed), []
        for _ in range(steps):
            (plan,) = planner.plan([Request()])
            plans.append(plan)
            levels, seconds = 1, self.draft * plan.draft_tokens
            if plan.draft_tokens and not plan.direct:
                levels, seconds, made = 2, 0.0, 0
                while made < plan.draft_tokens:
                    made += 1 + self._run(pick, KEPT, DRAFT)
                    seconds += self.few + DRAFT * self.draft
            tree = replace(chain([1] * plan.draft_tokens), levels=levels)
            (tree,) = planner.choose([Request()], [tree], 1)
            kept = self._run(pick, self.kept if levels == 2 else KEPT, len(tree))
            target = 1 + self.row * len(tree)
            judged = [(0, tree, tuple(range(kept)))]
            planner.observe(
                StepReport(1 + len(tree), 0, plan.draft_tokens, seconds, target, 0.0, 0.0, judged)
            )
        return plans

    @staticmethod
    def _run(pick: random.Random, chance: float, most: int) -> int:
        return next((i for i in range(most) if pick.random() >= chance), most)


@pytest.mark.parametrize("seed", range(3))
def test_a_middle_level_that_costs_a_full_pass_is_left_out(seed):
    world = World(few=0.95, kept=0.95)
    plans = world.run(world.planner(), 400, seed)[100:]
    assert sum(plan.direct for plan in plans) / len(plans) > 0.9
    assert all(plan.draft_tokens <= DRAFT for plan in plans if plan.direct)
    assert not all(plan.direct for plan in plans), "it is looked at again"


@pytest.mark.parametrize("seed", range(3))
def test_a_cheap_middle_level_is_used_and_goes_far(seed):
    """Few keys at a tenth of a pass, kept with 99 in 100: theory says so many that 16 is a limit."""
    world = World(few=0.1, kept=0.99)
    plans = world.run(world.planner(), 400, seed)[100:]
    used = [plan for plan in plans if not plan.direct]
    assert len(used) / len(plans) > 0.9
    assert sum(plan.draft_tokens for plan in used) / len(used) > 12


def test_a_cheap_middle_level_that_is_often_wrong_drafts_little():
    """What is refused was paid for: shorter rounds than where nearly all is kept."""
    lengths = []
    for kept in (0.7, 0.99):
        world = World(few=0.1, kept=kept)
        used = [plan for plan in world.run(world.planner(), 300)[100:] if not plan.direct]
        lengths.append(sum(plan.draft_tokens for plan in used) / max(1, len(used)))
    assert lengths[0] < 0.7 * lengths[1]


def test_it_notices_when_the_middle_level_begins_to_pay():
    """Another text, a longer history: first few keys cost a pass and are wrong at times, then neither."""
    world = World(few=1.0, kept=0.9)
    planner = world.planner()
    assert sum(plan.direct for plan in world.run(planner, 120)[-30:]) >= 26
    world.few, world.kept = 0.1, 0.99
    assert sum(plan.direct for plan in world.run(planner, 300)[-60:]) <= 6


def test_levels_that_have_nothing_to_add_are_left_out():
    """Histories that fit: all levels are asked, the lowest's drafts come; so it drafts by its own rules."""
    choice, asked = LevelChoice(), []
    for _ in range(200):
        lowest = choice.lowest()
        asked.append(lowest)
        choice.observe(lowest=True, tried_all=not lowest, tokens=2.0, time=1.0)
    assert asked[:3] == [False] * 3
    assert 0.85 < sum(asked[10:]) / 190 < 0.95, "they are asked now and then, which costs nothing"


def test_a_drafter_of_one_level_is_planned_as_before():
    plan = AdaptivePlanner(CostTable({1: 1.0, 8: 1.1}), 5).plan([Request()])[0]
    assert not plan.direct
    assert not FixedPlanner(3).plan([Request()])[0].direct


class Erratic(FixedPlanner):
    """Any length, by any levels."""

    def __init__(self, seed: int) -> None:
        super().__init__(9)
        self._random = random.Random(seed)

    def plan(self, requests):
        return [
            StepPlan(
                min(self._random.randint(0, 9), r.remaining - 1), "any", direct=self._random.random() < 0.5
            )
            for r in requests
        ]


@pytest.mark.parametrize("kv", ["dustin", "streaming"])
@pytest.mark.parametrize("name", ["draft", "ngram", "suffix"])
def test_the_text_does_not_depend_on_the_levels(name, kv, decoder):
    target = decoder("llama")
    for seed, params in enumerate((GREEDY, SEEDED)):
        wanted = [oracle.generate(target, prompt, params) for prompt in LONG]
        drafter = oracle.draft_model(target, target, width=2) if name == "draft" else name
        engine = oracle.engine(target, drafter, kv=kv, kv_budget=12, lossless=True)
        engine.planner = Erratic(seed)
        for _ in range(2):
            requests = oracle.run(engine, LONG, params)
            assert [r.output_ids for r in requests] == wanted
            assert all(r.lossless for r in requests)
        assert engine.stats.accepted > 0


def test_the_adaptive_planner_chooses_levels_in_the_engine(decoder):
    """Rounds are tried once a history is longer than the budget, and left out where they cost five steps."""

    class Told(AdaptivePlanner):
        def observe(self, report):
            levels = {tree.levels for _, tree, _ in report.judged if len(tree)}
            draft_s = 5.0 if 2 in levels else 0.0
            seconds = self.cost(report.rows)
            super().observe(replace(report, draft_s=draft_s, target_s=seconds, verify_s=0.0, rest_s=0.0))
            used.append(levels)

    target, used = decoder("llama"), []
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    engine = oracle.engine(
        target, oracle.draft_model(target, target), kv="streaming", kv_budget=40, lossless=True
    )
    engine.planner = Told(CostTable({1: 1.0, 101: 3.0}), 12, engine._drafter.direct_tokens)
    (request,) = oracle.run(engine, [LONG[2]], params)
    assert request.output_ids == oracle.generate(target, LONG[2], params)
    assert {1} in used
    assert {2} in used
    late = used[len(used) // 2 :]
    assert late.count({1}) > 0.6 * len(late)


def test_a_direct_plan_gets_the_inner_drafters_tree(decoder):
    """Siblings and all, of one level; the others are rounds of two."""
    target, seen = decoder("llama"), []
    engine = oracle.engine(
        target, oracle.draft_model(target, target, width=2), kv="streaming", kv_budget=8, lossless=True
    )

    class Alternating(FixedPlanner):
        def plan(self, requests):
            return [StepPlan(min(6, r.remaining - 1), "test", direct=bool(len(seen) % 2)) for r in requests]

        def choose(self, requests, trees, rows):
            seen.extend(trees)
            return list(trees)

    engine.planner = Alternating(6)
    oracle.run(engine, [LONG[2]], SamplingParams(max_tokens=40, ignore_eos=True))
    # the first hangs on the prompt, of which nothing is known yet
    drafts = [(place % 2, tree) for place, tree in enumerate(seen) if place and len(tree)]
    assert {t.levels for direct, t in drafts if direct} == {1}
    assert {t.levels for direct, t in drafts if not direct} == {2}
    assert any(-1 in tree.parents[1:] for direct, tree in drafts if direct), "siblings of the first token"
