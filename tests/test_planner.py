"""The planner: arithmetic by worked examples, choices by hand and against brute force, learning by
simulation."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.planner import AdaptivePlanner, CostTable, FixedPlanner, StepReport, cost, load_or_measure
from foretell.planner.acceptance import Acceptance
from foretell.planner.arithmetic import (
    Machine,
    Speculation,
    expected_tokens,
    kv_bytes,
    ring_overlap_tokens,
    weight_reads,
)
from foretell.planner.cost import measure
from foretell.types import DraftTree, StepPlan, chain
from tests import oracle

# ---- arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "n", "c", "tokens", "speedup"),
    [(0.8, 4, 0.05, 3.36, 2.80), (0.9, 7, 0.05, 5.70, 4.22), (0.8, 4, 0.3, 3.36, 1.53)],
)
def test_leviathans_examples(p, n, c, tokens, speedup):
    assert expected_tokens(p, n) == pytest.approx(tokens, abs=0.005)
    assert Speculation(p, 0, draft_cost=c).speedup(n) == pytest.approx(speedup, abs=0.006)


def test_best_lengths_with_a_free_draft():
    assert {Speculation(0.8, alpha).best_n() for alpha in (0.06, 0.08, 0.10)} == {6, 7}
    assert {Speculation(0.9, alpha).best_n() for alpha in (0.06, 0.08, 0.10)} <= {10, 11, 12}


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.25])
def test_the_speedup_tends_to_one_over_alpha(alpha):
    speculation = Speculation(1.0, alpha)
    assert speculation.asymptote() == pytest.approx(1 / alpha)
    assert speculation.speedup(100_000) == pytest.approx(1 / alpha, rel=1e-3)
    assert Speculation(0.999999, alpha).speedup(2000) < 1 / alpha


def test_speculation_that_does_not_pay():
    assert Speculation(0.1, 0.5).best_n() == 0
    assert Speculation(0.1, 0.5).speedup(0) == 1
    assert Speculation(0.5, 0, draft_cost=0).asymptote() == math.inf


def test_weight_reads_and_kv_sizes():
    assert weight_reads(3, 140e9, 7e9) == (420e9, 147e9)
    assert kv_bytes(80, 128_000, 8192, 2) == pytest.approx(336e9, rel=0.002)


def test_the_batch_decides_when_verification_computes():
    machine = Machine(bandwidth=2e12, flops=312e12)
    assert machine.free_rows(2) == 156
    assert machine.alpha(1, 7, 2) == 0
    assert machine.alpha(156, 3, 2) == pytest.approx(1)
    assert machine.alpha(64, 3, 2) == pytest.approx((256 - 156) / (3 * 156))
    assert machine.step_seconds(1, 140e9, 70e9) == pytest.approx(0.07)
    assert machine.step_seconds(32, 140e9, 70e9) == machine.step_seconds(1, 140e9, 70e9)


def test_ring_overlap():
    """Ring Attention's table: A100 over NVLink about 1.0K tokens, over InfiniBand about 24.5K."""
    assert ring_overlap_tokens(312e12, 300e9, 32, 32, 2, zigzag=False) == pytest.approx(1040)
    assert ring_overlap_tokens(312e12, 12.5e9, 32, 32, 2, zigzag=False) == pytest.approx(24_960)
    assert ring_overlap_tokens(312e12, 300e9, 32, 4, 2) == pytest.approx(2 * 1040 / 8)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((1.5, 0.1), "p"),
        ((-0.1, 0.1), "p"),
        ((0.5, -1), "alpha"),
        ((0.5, math.nan), "alpha"),
        ((0.5, 0.1, -1), "draft_cost"),
    ],
)
def test_bad_numbers(values, name):
    with pytest.raises(InputError, match=name):
        Speculation(*values)


# ---- cost -------------------------------------------------------------------------------------------


def test_a_cost_table_interpolates_goes_on_and_never_falls():
    table = CostTable({1: 10.0, 2: 9.0, 4: 12.0, 8: 20.0})
    assert [table(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [10, 10, 11, 12, 16, 20, 36]
    assert table.ratio(8) == 2
    assert table.alpha(8) == pytest.approx(1 / 7)


def test_a_cost_table_follows_the_machine():
    table = CostTable({1: 10.0, 4: 12.0, 8: 20.0})
    for _ in range(60):
        table.observe(1, 20.0)
        table.observe(8, 40.0)
    assert table(1) == pytest.approx(20, rel=0.05)
    assert table.ratio(8) == pytest.approx(2, rel=0.05), "twice as slow everywhere: the shape is the same"
    for _ in range(100):
        table.observe(1, 20.0)
        table.observe(8, 80.0)
    assert table.ratio(8) == pytest.approx(4, rel=0.15), "eight rows have become dearer"


def test_measuring_is_quick_kept_and_repeated_when_the_file_is_damaged(
    decoder, model_folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    model, folder = decoder("llama"), model_folder("llama")
    table = measure(model, seconds=0.2)
    assert sorted(table.seconds) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(0 < s < 1 for s in table.seconds.values())
    first = load_or_measure(model, folder)
    assert load_or_measure(model, folder).seconds == first.seconds
    (kept,) = (tmp_path / "cost").iterdir()
    kept.write_text('{"threads": 1, "seconds": {"1": "fast"}}')
    again = load_or_measure(model, folder).seconds
    assert again != first.seconds
    assert json.loads(kept.read_text())["seconds"] == {str(k): v for k, v in again.items()}


def test_a_damaged_or_strange_table_is_measured_again(decoder, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "measure", lambda model: measure(model, (1, 2), 0.02))
    model, folder = decoder("llama"), model_folder("llama")
    load_or_measure(model, folder)
    (kept,) = (tmp_path / "cost").iterdir()
    for content in ("null", '{"1": null}', '{"1": 1e400, "2": 1}', '{"2": 1}', '{"1": -1}', '{"1": 1}'):
        threads = 0 if content == '{"1": 1}' else 1
        kept.write_text(f'{{"threads": {threads}, "seconds": {content}}}')
        assert load_or_measure(model, folder)(1) < 1
    for content in ("", "[1]", '{"seconds": {"1": 1}}'):
        kept.write_text(content)
        assert load_or_measure(model, folder)(1) < 1


def test_the_fastest_number_of_threads_is_found_and_kept(decoder, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "_THREADS", 4)
    model, folder = decoder("llama"), model_folder("llama")
    before = torch.get_num_threads()
    slow = {4: 1.0, 2: 0.5, 1: 0.49}
    monkeypatch.setattr(cost, "_once", lambda *_: slow.get(torch.get_num_threads(), 9.0))
    try:
        torch.set_num_threads(4)
        assert cost.fastest_threads(model) == 2, "one thread is hardly faster than two"
        assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        load_or_measure(model, folder)
        assert torch.get_num_threads() == 4, "OMP_NUM_THREADS says how many"
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(cost, "_OURS", {4})
        torch.set_num_threads(3)
        load_or_measure(model, folder)
        assert torch.get_num_threads() == 3, "somebody has chosen"
        torch.set_num_threads(4)
        load_or_measure(model, folder)
        assert torch.get_num_threads() == 2
        files = sorted((tmp_path / "cost").iterdir())
        load_or_measure(model, folder)
        assert sorted((tmp_path / "cost").iterdir()) == files, "what we have set ourselves was not asked for"
        torch.set_num_threads(4)
        monkeypatch.setattr(cost, "_once", None)
        load_or_measure(model, folder)
        assert torch.get_num_threads() == 2, "from the cache, without a measurement"
    finally:
        torch.set_num_threads(before)


def test_a_model_with_a_tiny_context_is_measured(decoder):
    model = decoder("llama", max_position_embeddings=20)
    assert sorted(measure(model, seconds=0.05).seconds) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_sizes_that_were_too_slow_to_time_come_from_the_roofline(decoder, monkeypatch):
    model = decoder("llama")
    monkeypatch.setattr(cost, "_once", lambda *_: 7.0)
    monkeypatch.setattr(cost, "_head_seconds", lambda _, rows: {1: 1.0, 32: 8.0}[rows])
    table = measure(model, (1, 2, 4, 8, 16), seconds=-1.0).seconds
    assert table == {1: 7.0, 2: 7.0, 4: 7.0, 8: 14.0, 16: 28.0}, "4 rows compute while the weights are read"


# ---- choosing ---------------------------------------------------------------------------------------


@dataclass
class Request:
    id: int = 0
    remaining: int = 100


def planner(alpha: float = 0.1, max_draft: int = 16) -> AdaptivePlanner:
    """One row more costs `alpha` plain steps."""
    return AdaptivePlanner(CostTable({1: 1.0, 101: 1 + 100 * alpha}), max_draft)


def tree(confidence, parents=None) -> DraftTree:
    parents = range(-1, len(confidence) - 1) if parents is None else parents
    return DraftTree(tuple(range(len(confidence))), tuple(parents), confidence=tuple(confidence))


@given(
    alpha=st.floats(0.001, 1),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_what_is_chosen_is_the_best_prefix_of_the_likeliest(alpha, sizes, seed):
    pick, plan = random.Random(seed), planner(alpha)
    trees = []
    for size in sizes:
        parents = [pick.randrange(-1, i) if i else -1 for i in range(size)]
        confidence: list[float] = []
        for parent in parents:
            confidence.append((confidence[parent] if parent >= 0 else 1.0) * pick.random())
        trees.append(tree(confidence, parents))
    requests = [Request(i) for i in range(len(sizes))]
    kept = plan.choose(requests, trees, len(sizes))
    chances = sorted((c for i, t in enumerate(trees) for c in plan.acceptance.chances(i, t)), reverse=True)
    count = sum(map(len, kept))

    def rate(k: int) -> float:
        return (len(sizes) + sum(chances[:k])) / plan.cost(len(sizes) + k)

    least = plan.plan(requests)[0].worth * 2  # the drafters are given half of it
    assert all(c > least - 1e-9 for c in chances[:count]), "what is not worth drafting is never chosen"
    best = max(rate(k) for k in range(len(chances) + 1))
    assert rate(count) == pytest.approx(best) or (count == 0 and best < 1.011 * rate(0))
    for before, after in zip(trees, kept, strict=True):
        paths = {tuple(before.tokens[i] for i in before.path(n)) for n in range(len(before))}
        assert {tuple(after.tokens[i] for i in after.path(n)) for n in range(len(after))} <= paths


def test_one_budget_goes_to_the_request_that_can_use_it():
    plan = planner(0.3)
    sure, unsure = plan.choose([Request(0), Request(1)], [tree([0.99, 0.98, 0.97]), tree([0.12, 0.1])], 2)
    assert len(sure) == 3
    assert len(unsure) == 0


def test_sampled_and_whole_drafts_are_not_cut():
    import torch

    plan = planner(5.0)
    sampled = chain([1, 2], [torch.zeros(4).log_softmax(0)] * 2)
    whole = DraftTree((1, 2), (-1, 0), whole=True)
    assert plan.choose([Request(0), Request(1)], [sampled, whole], 2) == [sampled, whole]
    assert plan.choose([Request(0)], [tree([0.9, 0.8])], 1) == [DraftTree()]


def judged(
    plan: AdaptivePlanner, draft: DraftTree, kept: int, *, draft_s: float = 0.0, rows: int | None = None
) -> None:
    rows = 1 + len(draft) if rows is None else rows
    plan.observe(
        StepReport(rows, 0, len(draft), draft_s, plan.cost(rows), 0.0, 0.0, [(0, draft, tuple(range(kept)))])
    )


def test_confidence_is_calibrated():
    """A drafter that says 0.6 and is always right; one that says 0.95 and is never."""
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe(0, tree([0.6]), (0,))
        acceptance.observe(1, DraftTree((1,), (-1,), confidence=(0.95,), origin=1), ())
    assert acceptance.chances(9, tree([0.6]))[0] > 0.9
    assert acceptance.chances(9, DraftTree((1,), (-1,), confidence=(0.95,), origin=1))[0] < 0.25


def test_a_change_of_text_is_noticed_within_30_steps():
    plan, draft = planner(0.08), tree([0.95**i for i in range(1, 13)])
    for _ in range(50):
        (kept,) = plan.choose([Request()], [draft], 1)
        judged(plan, kept, len(kept))
    assert len(kept) == 12, "repetitive: all of it"
    sizes = []
    for _ in range(60):
        (kept,) = plan.choose([Request()], [draft], 1)
        sizes.append(len(kept))
        judged(plan, kept, 0)
    assert sizes[10] <= 4, "free text: a few steps later hardly anything"
    assert max(sizes[25:]) <= 1
    assert sum(sizes[45:]) <= 3, "and then next to nothing"
    back = 0
    while len(kept) < 12 and back < 400:
        (kept,) = plan.choose([Request()], [draft], 1)
        judged(plan, kept, len(kept))
        back += 1
    assert back < 300, "and back again, though nothing was tried meanwhile"


def test_a_costly_drafter_rests_and_is_looked_at_more_and_more_rarely():
    plan = planner(0.2)
    request, tried = Request(), []
    for step in range(600):
        (decision,) = plan.plan([request])
        if decision.draft_tokens:
            tried.append(step)
            judged(plan, tree([0.5] * decision.draft_tokens), 0, draft_s=0.3 * decision.draft_tokens)
        else:
            assert decision.free_tokens == 16
            judged(plan, DraftTree(), 0)
    late = [step for step in tried if step > 60]
    assert 3 <= len(late) <= 12, "three looks at a time"
    pauses = [b - a for a, b in pairwise(late) if b - a > 1]
    assert pauses == sorted(pauses)


def test_a_new_request_is_looked_at_whatever_the_others_were_like():
    """A head that was no use for a summary may be some for a sum; but short requests in a row do not make
    every step a look."""
    plan = planner(0.05)

    def tried(request, steps):
        looks = []
        for step in range(steps):
            (decision,) = plan.plan([request])
            if decision.draft_tokens:
                looks.append(step)
            judged(plan, tree([0.5] * decision.draft_tokens), 0, draft_s=0.05 * decision.draft_tokens)
        plan.forget(request.id)
        return looks

    assert len(tried(Request(id=1), 400)) < 25
    assert tried(Request(id=2), 20) == [1, 2, 3]
    assert tried(Request(id=3), 10) == [], "the last looks are just over"
    short = [len(tried(Request(id=10 + number), 8)) for number in range(40)]
    assert 0 < sum(short) <= 30, "of 320 steps"


def looks_of(batch: int, draft_s: float, steps: int = 600) -> tuple[list[int], set[int]]:
    """Steps with drafts that cost so much and gain nothing, and who made them."""
    plan, steps_with, who = planner(0.01), [], set()
    requests = [Request(id=i) for i in range(batch)]
    for step in range(steps):
        drafting = {r.id for r, p in zip(requests, plan.plan(requests), strict=True) if p.draft_tokens}
        steps_with += [step] if drafting else []
        who |= drafting
        draft, seconds = tree([0.5]), draft_s * plan.cost(batch) if drafting else 0.0
        trees = [(r.id, draft if r.id in drafting else DraftTree(), ()) for r in requests]
        plan.observe(StepReport(batch, 0, len(drafting), seconds, plan.cost(batch), 0.0, 0.0, trees))
    return steps_with, who


def test_looks_that_cost_more_are_rarer_and_a_few_of_a_batch_look_for_all():
    (cheap, who), (dear, _) = looks_of(16, 0.3), looks_of(16, 3.0)
    assert who == {0, 1, 2, 3}
    assert looks_of(1, 0.3)[1] == {0}
    gaps = [[b - a for a, b in pairwise(steps) if b - a > 1] for steps in (cheap, dear)]
    assert gaps[0][0] == 33
    assert 220 <= gaps[1][0] <= 230, "three plain steps each, three times: 4 % of the steps until the next"


def test_a_request_or_two_that_are_new_in_a_batch_are_no_new_text():
    rest = [Request(id=i) for i in range(8)]
    plan, looked = planner(0.01), []
    for step in range(1200):
        requests = [*rest[1:], Request(id=100 + step // 40)]  # one in eight is another every 40 steps
        drafting = [r.id for r, p in zip(requests, plan.plan(requests), strict=True) if p.draft_tokens]
        looked += [step] if drafting else []
        judged_ = [(r.id, tree([0.5]) if r.id in drafting else DraftTree(), ()) for r in requests]
        seconds = 0.5 * plan.cost(8) if drafting else 0.0
        plan.observe(StepReport(8, 0, len(drafting), seconds, plan.cost(8), 0.0, 0.0, judged_))
    assert len(looked) <= 48, "twice or three times per batch that has been replaced, not once per request"


def test_what_a_large_batch_taught_is_not_held_against_a_small_one():
    """Rows that nobody can spare at batch 16 are free at batch 1: drafts come back when the load is gone."""
    plan = AdaptivePlanner(CostTable({1: 1.0, 8: 1.1, 16: 2.0, 32: 4.0}), 8)
    draft = replace(tree([0.7, 0.45]), passes=2)

    def run(batch, first_id, steps):
        requests, drafted = [Request(id=first_id + i) for i in range(batch)], 0
        for _ in range(steps):
            plans = plan.plan(requests)
            trees = [draft if p.draft_tokens else DraftTree() for p in plans]
            drafted += sum(map(bool, map(len, trees)))
            kept = plan.choose(requests, trees, batch)
            seconds = 0.5 * plan.cost(batch) if any(map(len, trees)) else 0.0
            rows = batch + sum(map(len, kept))
            judged_ = [(r.id, t, tuple(range(len(t)))) for r, t in zip(requests, kept, strict=True)]
            plan.observe(StepReport(rows, 0, 2, seconds, plan.cost(rows), 0.0, 0.0, judged_))
        return drafted

    assert run(16, 0, 400) < 60
    assert run(1, 100, 60) > 40


def test_a_drafts_price_is_that_of_steps_in_which_nobody_catches_up():
    """The first draft after a prompt, or after a pause, also reads what its drafter has missed."""
    plan, requests = planner(0.01), [Request(id=0)]
    draft = replace(tree([0.9]), passes=1)
    for step in range(30):
        if step % 5 == 4:
            requests = [Request(id=step)]
        (decision,) = plan.plan(requests)
        assert decision.draft_tokens
        catching_up = plan._catching_up
        assert catching_up == (step == 0 or step % 5 == 4)
        kept = plan.choose(requests, [draft], 1)
        seconds = 40.0 if catching_up else 0.1
        plan.observe(StepReport(2, 0, 1, seconds, 1.0, 0.0, 0.0, [(requests[0].id, kept[0], (0,))]))
    assert plan.paced.time == pytest.approx(0.1, rel=0.1)
    assert plan._costs[1].per_step == pytest.approx(0.1)


def test_a_costly_drafter_that_pays_is_used_as_long_as_it_pays():
    plan = planner(0.05)
    for _ in range(80):
        (decision,) = plan.plan([Request()])
        n = decision.draft_tokens
        judged(plan, tree([0.7**i for i in range(1, n + 1)]), min(n, 4), draft_s=0.02 * n)
    assert decision.reason == "as long as it pays"
    assert 3 <= decision.draft_tokens <= 6, "four tokens are kept, more are not"


def test_limits_of_a_plan():
    assert planner().plan([Request(remaining=1)])[0].draft_tokens == 0
    assert planner().plan([Request(remaining=4)])[0].draft_tokens == 3
    plan, free = planner(max_draft=5), "drafting is free"
    assert plan.plan([Request()])[0].reason == "a look whether drafting pays"
    judged(plan, DraftTree(), 0)
    assert plan.plan([Request()])[0].draft_tokens == 5, "the first draft's time says nothing"
    judged(plan, DraftTree(), 0)
    assert plan.plan([Request()])[0] == StepPlan(5, free, worth=pytest.approx(0.05))
    assert FixedPlanner(3).choose([Request()], [tree([0.1])], 1) == [tree([0.1])]


class Timeless(AdaptivePlanner):
    """Takes every step to have cost what its table says, and drafts nothing: no clock decides a test."""

    def observe(self, report):
        super().observe(
            replace(report, draft_s=0.0, target_s=self.cost(report.rows), verify_s=0.0, rest_s=0.0)
        )


# ---- in the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["suffix", "lookahead", "self"])
def test_answers_do_not_depend_on_the_planner(drafter, decoder):
    from foretell.types import SamplingParams

    target = decoder("llama")
    prompts = [[5, 17, 33, 8, 61], [40, 41, 9, 40, 41, 9, 40, 41], [7]]
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.9, seed=3)):
        wanted = [oracle.generate(target, p, params) for p in prompts]
        made = oracle.draft_model(target, target) if drafter == "self" else drafter
        engine = oracle.engine(target, made)
        engine.planner = Timeless(CostTable({1: 1.0, 101: 6.0}), 8)
        assert [r.output_ids for r in oracle.run(engine, prompts, params)] == wanted
        assert engine.stats.drafts > 0
        assert not engine.planner.acceptance._factors
