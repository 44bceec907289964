"""Trees that grow pass by pass: how far they grow follows from what a pass costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foretell.drafters.grow import BestFirst, Fixed, Growth
from tests.test_planner import Request, judged, planner, tree


def ranked(*chances: float) -> list[tuple[int, float]]:
    return [(token, math.log(chance)) for token, chance in enumerate(chances, start=5)]


@pytest.mark.parametrize("shape", [BestFirst(4, 2), Fixed([(0,), (1,), (0, 0), (0, 1)])])
def test_a_tree_stops_where_a_pass_would_not_pay(shape):
    """What was found stays in the tree; only its followers are not looked at."""
    for pass_worth, passes in ((0.0, 2), (0.29, 2), (0.31, 1), (0.61, 0)):
        growth = Growth(shape, 4, frozenset(), 0.0, pass_worth)
        growth.offer(None, ranked(0.6, 0.2))
        done = 0
        while done < 2 and (level := growth.next_level()):
            done += 1
            for candidate in level:
                growth.offer(candidate, ranked(0.5, 0.1))
        if isinstance(shape, Fixed):
            passes = min(passes, 1)
        assert done == passes
        made = growth.tree()
        assert made.tokens[:2] == (5, 6)
        assert len(made) == (4 if done else 2)


def test_the_planner_prices_a_pass():
    """Drafts of three passes, half a plain step each: their followers must be that likely, given how often
    the first token is kept."""
    plan, request = planner(0.01), Request()
    draft = replace(tree([0.9, 0.8, 0.3]), passes=3)
    assert plan.plan([request])[0].pass_worth == 0
    for _ in range(60):
        plan.plan([request])
        plan.choose([request], [draft], 1)
        judged(plan, draft, 2, draft_s=1.5)
    decision = plan.plan([request])[0]
    if not decision.draft_tokens:
        decision = next(d for d in (plan.plan([request])[0] for _ in range(200)) if d.draft_tokens)
    kept = plan.acceptance.by_depth(1)[0] * plan.acceptance.factor(request.id)
    assert decision.pass_worth == pytest.approx(0.5 / plan.cost(1) / kept, rel=1e-6)
    assert 0.4 < decision.pass_worth < 0.7
