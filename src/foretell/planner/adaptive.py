"""The planner that measures: it lets a draft be verified as far as that is expected to pay.

Before drafting it decides how long a draft may be, from what drafting costs and how deep drafts have been
kept. Afterwards it keeps, over the whole batch, the nodes that are most likely to be accepted, as many as
raise the expected tokens per second: one more row costs what the cost table says, and gains its chance.
Drafts that were sampled are kept whole, because dropping a token by its looks would bias what is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.planner.acceptance import Acceptance
from foretell.planner.base import PlannedRequest, StepReport
from foretell.planner.cost import CostTable
from foretell.planner.levels import LevelChoice
from foretell.planner.looks import Looks
from foretell.planner.paced import Paced
from foretell.types import EMPTY_TREE, DraftTree, StepPlan

_FREE = 0.02  # drafting that costs less than this share of a step is done without asking
_MARGIN = 1.01  # gain that a draft must promise: what is measured is never quite true
_PROBE = 4  # tokens of a draft that only looks whether drafting pays
_MEMORY = 0.9
_ROUNDS = 0.6  # of drafts by several levels, each of which takes many passes already
_SPANS = (1, 4, 16, 64)  # further rows, of which the mean price is asked
_MISJUDGED = 0.5  # a node may be worth so much more than its drafter believes


@dataclass(slots=True)
class _DraftCost:
    """Seconds of drafting, as measured: per step, and per proposed token. `memory`: weight of the past."""

    memory: float = _MEMORY
    seen: bool = False
    per_step: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """One step's drafting."""
        keep = self.memory
        self.per_step = keep * self.per_step + (1 - keep) * seconds if self.seen else seconds
        self.seen = True
        self.seconds = keep * self.seconds + seconds
        self.tokens = keep * self.tokens + tokens


@dataclass(slots=True)
class _WholeDrafts:
    """Drafts that are verified whole or not at all: their mean size, and what they gained."""

    nodes: float = 0.0
    gain: float = 0.0

    def observe(self, nodes: int, gained: int) -> None:
        """One such draft was judged."""
        first = not self.nodes
        self.nodes = nodes if first else _MEMORY * self.nodes + (1 - _MEMORY) * nodes
        self.gain = 1.0 if first else _MEMORY * self.gain + (1 - _MEMORY) * gained


class AdaptivePlanner:
    """See `Planner`.

    Args:
        cost: seconds of a step by rows.
        max_draft: longest draft per request.
        direct: of a drafter with several levels, the longest draft that suits the lowest alone; 0 = it has
            one level.
    """

    def __init__(self, cost: CostTable, max_draft: int, direct: int = 0) -> None:
        self.cost = cost
        self.max_draft = max_draft
        self.acceptance = Acceptance()
        self.levels = LevelChoice()
        self._most_direct = min(direct, max_draft)
        self._direct = False  # whether the lowest level drafts alone in this step
        self._costs = {1: _DraftCost(), 2: _DraftCost(_ROUNDS)}  # of the lowest level alone, and of all
        self.whole = _WholeDrafts()
        self._looks = Looks()
        self._drafting: set[int] = set()  # requests whose drafts may cost something in this step
        self._catching_up = False  # whether some of them did not draft in the last step
        self.paced = Paced()
        self._passes: dict[int, int] = {}  # of this step's drafts, by request
        self._waiting = True  # whether some request would not have drafted
        self._prices: list[tuple[float, float]] | None = None

    def plan(self, requests: Sequence[PlannedRequest]) -> list[StepPlan]:
        """How long each draft may be."""
        self._looks.begin([request.id for request in requests], self._waiting)
        self._waiting, self._prices = False, None
        if requests and self._most_direct:
            self._direct = self.levels.lowest()
        plans = [self._length(request, len(requests)) for request in requests]
        if any(plan.draft_tokens or plan.free_tokens for plan in plans):
            plans = self._worth(requests, plans)
        drafting = {request.id for request, plan in zip(requests, plans, strict=True) if plan.draft_tokens}
        self._catching_up = not drafting <= self._drafting
        self._drafting = drafting
        return plans

    def choose(
        self, requests: Sequence[PlannedRequest], trees: Sequence[DraftTree], rows: int
    ) -> list[DraftTree]:
        """The parts of the drafts that are worth verifying.

        Args:
            rows: what the step computes without any draft.
        """
        chances = [
            self.acceptance.chances(request.id, tree) for request, tree in zip(requests, trees, strict=True)
        ]
        self._passes = {r.id: tree.passes for r, tree in zip(requests, trees, strict=True) if tree.passes}
        untouched = [tree.whole or tree.log_q is not None for tree in trees]
        fixed = sum(len(tree) for tree, own in zip(trees, untouched, strict=True) if own)
        order = sorted(
            (-chance, index, node)
            for index, own in enumerate(chances)
            if not untouched[index]
            for node, chance in enumerate(own)
        )
        best, gained = 0, float(len(requests))
        best_rate = gained / self.cost(rows + fixed) * _MARGIN
        for count, (negative, _, _) in enumerate(order, start=1):
            gained -= negative
            rate = gained / self.cost(rows + fixed + count)
            if rate > best_rate:
                best, best_rate = count, rate
        kept: list[set[int]] = [set() for _ in trees]
        for _, index, node in order[:best]:
            kept[index].add(node)
        return [
            tree if same or len(own) == len(tree) else _part(tree, own)
            for tree, own, same in zip(trees, kept, untouched, strict=True)
        ]

    def observe(self, report: StepReport) -> None:
        """Learns from a finished step."""
        if report.prompt_rows == 0:
            self.cost.observe(report.rows, report.target_s + report.verify_s + report.rest_s)
        made = max((tree.levels for _, tree, _ in report.judged if len(tree)), default=self._levels_used)
        if not self._catching_up:  # a first draft also reads what its drafter has missed
            self._observe_drafting(report, made)
        if report.judged and not report.prompt_rows:
            seconds = report.draft_s + report.target_s + report.verify_s + report.rest_s
            batch, emitted = len(report.judged), sum(1 + len(path) for _, _, path in report.judged)
            time = seconds / self.cost(batch)
            self._looks.observe(time, emitted, batch)
            if self._most_direct:
                self.levels.observe(
                    lowest=made == 1 or self._direct,
                    tried_all=not self._direct,
                    tokens=emitted / batch,
                    time=time,
                )
        self.acceptance.step()
        for request_id, tree, path in report.judged:
            self.acceptance.observe(request_id, tree, path)
            if tree.whole and len(tree):
                self.whole.observe(len(tree), len(path))
            if request_id in self._passes:
                self.paced.of(len(report.judged)).judged(len(tree), len(path))
        self._passes = {}

    def _observe_drafting(self, report: StepReport, levels: int) -> None:
        """What drafting has cost."""
        if self._passes:
            time = report.draft_s / self.cost(len(self._passes))
            self.paced.drafted(max(self._passes.values()), time)
        cost = self._costs[levels]
        if self._drafting and (report.proposed or not cost.seen):
            cost.observe(report.draft_s, report.proposed)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self.acceptance.forget(request_id)
        self._looks.forget(request_id)

    @property
    def _levels_used(self) -> int:
        """Levels that this step's plans ask for."""
        return 2 if self._most_direct and not self._direct else 1

    def _worth(self, requests: Sequence[PlannedRequest], plans: Sequence[StepPlan]) -> list[StepPlan]:
        """The plans, with what nodes must promise. A pass costs the batch its seconds and finds followers in
        every draft, so its price in plain steps is what it has to gain in each."""
        least = _MISJUDGED * self._least_chance(len(requests))
        kept = max(self.acceptance.by_depth(1, self._levels_used)[0], least)
        price = self.paced.per_pass / kept
        factors = [self.acceptance.factor(request.id) for request in requests]
        return [
            replace(plan, worth=least / factor, pass_worth=price / factor, direct=self._direct)
            if plan.draft_tokens or plan.free_tokens
            else plan
            for plan, factor in zip(plans, factors, strict=True)
        ]

    def _least_chance(self, batch: int) -> float:
        """What a node's chance must be, if any is to raise the tokens per second: the cheapest further row's
        cost, in plain steps of the batch, for each of the batch's tokens."""
        if not batch or not self.max_draft:
            return 0.0
        plain = self.cost(batch)
        return batch * min((self.cost(batch + count) - plain) / count for count in _SPANS) / plain

    def _length(self, request: PlannedRequest, batch: int) -> StepPlan:
        room = min(self._most_direct if self._direct else self.max_draft, request.remaining - 1)
        if room <= 0:
            return StepPlan(0, "nothing is left to draft" if self.max_draft else "speculation is off")
        if self.whole.nodes and self._levels_used == 1:
            return self._whole_or_none(request.id, room, batch)
        if self.paced.of(batch).seen and self._levels_used == 1:
            return self._paced_or_none(request.id, room, batch)
        cost = self._costs[self._levels_used]
        if cost.seen and cost.per_step < _FREE * self.cost(batch):
            return StepPlan(room, "drafting is free")
        if cost.seen and (best := self._best_length(request.id, room, batch)):
            return StepPlan(best, "as long as it pays", free_tokens=room)
        look = min(self._levels_used * _PROBE, room) if cost.seen else room
        return self._off(request.id, look, room)

    def _whole_or_none(self, request_id: int, room: int, batch: int) -> StepPlan:
        plan, nodes = StepPlan(room, "whole drafts pay"), round(self.whole.nodes) * batch
        return self._all_or_none(request_id, plan, self.whole.gain, nodes, 0.0, batch)

    def _paced_or_none(self, request_id: int, room: int, batch: int) -> StepPlan:
        gained = self.paced.of(batch)
        gain, nodes = gained.gain * self.acceptance.factor(request_id), round(gained.nodes * batch)
        plan = StepPlan(room, "drafts that end themselves pay", free_tokens=room)
        return self._all_or_none(request_id, plan, gain, nodes, self.paced.time, batch)

    def _all_or_none(
        self, request_id: int, plan: StepPlan, gain: float, nodes: int, time: float, batch: int
    ) -> StepPlan:
        """The plan, if drafts that gain so many tokens with so many nodes and plain steps of drafting pay."""
        if (1 + gain) / (self.cost(batch + nodes) / self.cost(batch) + time) > _MARGIN:
            return plan
        return self._off(request_id, plan.draft_tokens, plan.draft_tokens)

    def _off(self, request_id: int, look: int, room: int) -> StepPlan:
        """No draft, but for a look now and then; what is free goes on."""
        self._waiting = True
        alone = self._looks.on and request_id in self._looks.who
        if alone or (self._most_direct and self.levels.looking):
            return StepPlan(look, "a look whether drafting pays", free_tokens=room)
        return StepPlan(0, "off: drafting costs more than it gains", free_tokens=room)

    def _best_length(self, request_id: int, room: int, batch: int) -> int:
        """Draft length with the highest expected tokens per second; 0 = plain decoding."""
        factor = self.acceptance.factor(request_id)
        gained, best, best_rate = 1.0, 0, _MARGIN / self.cost(batch)
        for length, (chance, seconds) in enumerate(self._lengths(batch)[:room], start=1):
            gained += min(0.999, chance * factor)
            if gained > best_rate * seconds:
                best, best_rate = length, gained / seconds
        return best

    def _lengths(self, batch: int) -> list[tuple[float, float]]:
        """For drafts of 1, 2 ... tokens, the same for the whole batch: the chance that the last one is kept,
        and the step's seconds. Made once per step."""
        if self._prices is None:
            per_token = self._costs[self._levels_used].per_token
            kept = self.acceptance.by_depth(self.max_draft, self._levels_used)
            self._prices = [
                (chance, self.cost(batch * (1 + length)) + per_token * length * batch)
                for length, chance in enumerate(kept, start=1)
            ]
        return self._prices


def _part(tree: DraftTree, kept: set[int]) -> DraftTree:
    """The tree without the other nodes. Chances fall along a path, so parents are kept with their
    children."""
    if not kept:
        return EMPTY_TREE
    order = sorted(kept)
    new = {-1: -1} | {old: place for place, old in enumerate(order)}
    confidence = None if tree.confidence is None else tuple(tree.confidence[node] for node in order)
    return DraftTree(
        tuple(tree.tokens[node] for node in order),
        tuple(new[tree.parents[node]] for node in order),
        confidence=confidence,
        origin=tree.origin,
        levels=tree.levels,
        passes=tree.passes,
    )
