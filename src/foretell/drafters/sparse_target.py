"""The target drafts for itself reading few of its keys; then a full pass verifies. Exact under every rule.

Alone it is self-speculation (MagicDec, Chen et al. 2024): token by token, no second model, no second cache.
With a drafter inside it is the middle level of a hierarchy (TriForce, Sun et al. 2024): the inner drafter
proposes, the target with few keys judges by the same rule, and what it keeps waits as the draft of the full
pass. Nothing is emitted before that pass, which writes the keys and values of every row anew.

- A round selects its slots once, from what the last full pass showed; tokens that wait are read whole.
  Where an inner draft tells what it looks at, each of its drafts selects again; but not where a rule reads
  what tokens were drawn from: that distribution would depend on the very draft that it judges, and what is
  kept would be no sample of it.
- Alone, a round may select by what the drafts of the round before looked at: those have been judged, so no
  distribution depends on the draft that it judges.
- Where a history fits the budget there is nothing to gain: the inner drafter drafts for the full pass itself.
- An inner drafter follows a copy of the request that runs ahead; rejected tokens are taken back from it.

Shape suffixes: R rows, V vocabulary, N positions of the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from foretell.attention import pack
from foretell.cache import KVArena
from foretell.drafters.base import (
    AttendingDrafter,
    Drafter,
    DrafterContext,
    DraftRequest,
    Observed,
    RetractingDrafter,
    looks_ahead,
)
from foretell.drafters.rounds import Ahead, Round
from foretell.errors import InputError
from foretell.models.base import ForwardOutput, TargetModel
from foretell.noise import Stream, make_key
from foretell.sampling import Sampler
from foretell.sparse import (
    POLICIES,
    Heads,
    KVReader,
    ModelShape,
    Reader,
    choose,
    draft_mass,
    goes_by_profile,
    shape_of,
    spread_layers,
    watching,
)
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, StepPlan, Verdict

_PENDING = 16  # tokens that wait for a full pass, where nobody says otherwise
_OWN = 6  # tokens that the target drafts alone

# (sampler, draft, logits [R, V], likeliest token of each row) -> verdict of the rule in use
Judge = Callable[[Sampler, DraftTree, Tensor, Sequence[int]], Verdict | None]


@dataclass(frozen=True, slots=True)
class SelfOptions:
    """Options of self-speculation.

    Args:
        kv: which keys drafting reads: streaming, snapkv, h2o, quest, dustin (by what its last drafts looked
            at, then the last token).
        budget: how many tokens of the history.
    """

    kv: str = "snapkv"
    budget: int = 512

    def __post_init__(self) -> None:
        if self.kv not in POLICIES:
            raise InputError(f"kv must be one of {', '.join(POLICIES)}, got {self.kv!r}")


@dataclass(frozen=True, slots=True)
class Inner:
    """The level below the target with few keys.

    Args:
        drafter: proposes to it.
        judge: the rule, as the full pass applies it.
        invariant: see `Rule`. Where not, draws of this level are new in every round.
        needs_q: see `Rule`.
    """

    drafter: Drafter
    judge: Judge
    invariant: bool
    needs_q: bool


class SparseTargetDrafter:
    """See `Drafter`.

    Args:
        target: the model; its cache is borrowed.
        reader: what drafting reads.
        inner: who proposes to the target with few keys; None = nobody, it decodes.
        name: what the target was loaded as.
    """

    expects = 0.02

    def __init__(
        self, target: TargetModel, reader: Reader, inner: Inner | None = None, name: str = ""
    ) -> None:
        self._target = target
        self._name = name
        self._reader = reader
        self._inner = inner
        self._inner_needs = NO_NEEDS if inner is None else inner.drafter.needs
        self.needs = reader.needs | self._inner_needs
        self.draft_tokens = _OWN if inner is None else _PENDING
        self.direct_tokens = 0 if inner is None else inner.drafter.draft_tokens
        self._arena: KVArena | None = None
        self._ahead: dict[int, Ahead] = {}
        self._rounds: dict[int, Round] = {}
        self._looks_ahead = inner is not None and not inner.needs_q and looks_ahead(inner.drafter, reader)
        self._watched: tuple[Heads, ...] = ()
        self._looked: dict[int, Tensor] = {}  # where the drafts of the round before looked
        if inner is None and reader.wants_draft:
            self.watch(reader.draft_heads)

    def borrow(self, arena: KVArena) -> None:
        """See `BorrowingDrafter`."""
        self._arena = arena

    def start(self, request: DraftRequest) -> None:
        """Follows the request, and lets a copy of it run ahead."""
        self._reader.start(request.id, len(request.tokens))
        if self._inner is not None:
            tokens = list(request.tokens)
            sampler = request.sampler.fork(tokens)
            ahead = Ahead(request.id, tokens, request.capacity, request.end_ids, sampler)
            self._ahead[request.id] = ahead
            self._inner.drafter.start(ahead)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """A chain per request, made for all of them together; the inner drafter's own trees where a history
        is read whole."""
        rounds = [self._begin(request, plan) for request, plan in zip(requests, plans, strict=True)]
        trees = self._direct(requests, plans, rounds)
        while active := [part for part in rounds if part is not None and part.open]:
            self._advance(active)
        levels = 1 if self._inner is None else 2
        return [
            tree if part is None else replace(part.draft(), levels=levels)
            for tree, part in zip(trees, rounds, strict=True)
        ]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """Takes in what the full pass read, and takes back what it refused."""
        assert self._arena is not None
        assert request.lease is not None
        self._reader.observe(request.id, seen.queries, range(seen.count), self._arena, request.lease)
        ended = self._rounds.pop(request.id, None)
        if self._inner is None:
            self._remember(request.id, ended, seen.start)
            return
        ahead = self._ahead[request.id]
        if ended is None:
            ahead.tokens += request.tokens[len(ahead.tokens) :]
            self._inner.drafter.observe(ahead, seen)
            return
        common, most = seen.start + 1, min(len(request.tokens), len(ahead.tokens))
        while common < most and request.tokens[common] == ahead.tokens[common]:
            common += 1
        if common < len(ahead.tokens):
            self._retract(request, ahead, common)
        if common < len(request.tokens):
            ahead.tokens += request.tokens[common:]
            self._inner.drafter.observe(ahead, _plain_step(seen, common, ahead.tokens[-1]))

    def finish(self, request: DraftRequest) -> None:
        """Forgets the request."""
        self._reader.finish(request.id)
        self._rounds.pop(request.id, None)
        self._looked.pop(request.id, None)
        if self._inner is not None:
            self._inner.drafter.finish(self._ahead.pop(request.id))

    def forget(self) -> None:
        """The inner drafter does; there is nothing else to forget."""
        if self._inner is not None:
            self._inner.drafter.forget()

    @property
    def looker(self) -> ModelShape | None:
        """See `AttendingDrafter`: alone the target is; above an inner drafter it drafts for nobody else."""
        return shape_of(self._target, self._name) if self._inner is None else None

    def watch(self, heads: Sequence[Heads] = ()) -> bool:
        """See `AttendingDrafter`. Its own reader may watch too, by the same heads."""
        if self._inner is None:
            self._watched = tuple(heads) or self._watched or spread_layers(self._target.num_layers)
        return bool(self._watched)

    def draft_attention(self, request: DraftRequest, length: int) -> Tensor | None:
        """See `AttendingDrafter`: over the whole history, of which drafting read little."""
        assert self._arena is not None
        if (part := self._rounds.get(request.id)) is None:
            return None
        return draft_mass(part.looks, self._watched, self._arena, part.lease.start, length)

    def _remember(self, request_id: int, ended: Round | None, length: int) -> None:
        """Keeps for the next round where the drafts of this one looked; it had a history of `length`."""
        assert self._arena is not None
        self._looked.pop(request_id, None)
        if ended is None or not self._reader.wants_draft:
            return
        start = ended.lease.start
        looked_N = draft_mass(ended.looks, self._watched, self._arena, start, length)
        if looked_N is not None:
            self._looked[request_id] = looked_N

    def _begin(self, request: DraftRequest, plan: StepPlan) -> Round | None:
        """A round, if the prompt has been read and its history is too long to be read whole."""
        lease = request.lease
        if plan.direct or not plan.draft_tokens or lease is None or lease.length != len(request.tokens) - 1:
            return None
        if not self._reader.ready(request.id):
            return None
        assert self._arena is not None
        looked_N = self._looked.get(request.id)
        if looked_N is not None:  # what is newer was not looked at
            looked_N = F.pad(looked_N, (0, lease.length - len(looked_N)))
        if (selected := self._reader.select(request.id, self._arena, lease, looked_N)) is None:
            return None
        ahead = self._ahead.get(request.id)
        if ahead is not None and self._inner is not None and not self._inner.invariant:
            # how much of a round is kept says something about its draws: no two rounds may share them
            ahead.sampler.seed = make_key(request.sampler.seed, Stream.MIDDLE, len(request.tokens)) >> 1
        self._rounds[request.id] = Round(request, ahead, lease, plan.draft_tokens, selected)
        return self._rounds[request.id]

    def _direct(
        self,
        requests: Sequence[DraftRequest],
        plans: Sequence[StepPlan],
        rounds: Sequence[Round | None],
    ) -> list[DraftTree]:
        """The inner drafter's trees for requests without a round."""
        if self._inner is None:
            return [EMPTY_TREE for _ in requests]
        places = [i for i, part in enumerate(rounds) if part is None]
        copies, own = [self._ahead[requests[i].id] for i in places], [plans[i] for i in places]
        found = dict(zip(places, self._inner.drafter.propose(copies, own), strict=True))
        return [found.get(i, EMPTY_TREE) for i in range(len(requests))]

    def _advance(self, active: Sequence[Round]) -> None:
        """One pass of the target over few keys for all open rounds."""
        assert self._arena is not None
        trees = self._inner_drafts(active)
        segments = [part.segment(tree) for part, tree in zip(active, trees, strict=True)]
        needs = self._inner_needs | watching(self._watched)
        output = self._target.forward(pack(segments, self._arena), needs)
        best_R: list[int] = [] if self._inner is None else output.logits_RV.argmax(-1).tolist()
        row = 0
        for part, tree in zip(active, trees, strict=True):
            rows = slice(row, row + 1 + len(tree))
            if part.ahead is None:
                self._decode(part, output.logits_RV[row])
                if self._watched:
                    part.looks.append({n: found.at([row]) for n, found in output.queries.items()})
            else:
                self._judge(part, part.ahead, tree, output, rows, best_R[rows])
            row = rows.stop

    def _inner_drafts(self, active: Sequence[Round]) -> list[DraftTree]:
        """What the inner drafter proposes to each round; one place is left for the target's token."""
        if self._inner is None:
            return [EMPTY_TREE for _ in active]
        drafter, most = self._inner.drafter, self._inner.drafter.draft_tokens
        copies = [part.ahead for part in active if part.ahead is not None]
        room = [part.budget - len(part.pending) - 1 for part in active]
        trees = drafter.propose(copies, [StepPlan(min(most, left), "inner draft") for left in room])
        if self._looks_ahead and isinstance(drafter, AttendingDrafter):
            assert self._arena is not None
            for part, copy in zip(active, copies, strict=True):
                ahead_N = drafter.draft_attention(copy, part.lease.length)
                selected = self._reader.select(copy.id, self._arena, part.lease, ahead_N)
                part.selected = part.selected if selected is None else selected
        return trees

    def _decode(self, part: Round, logits_V: Tensor) -> None:
        """The target's own token over few keys."""
        drawn, log_q_V = part.request.sampler.draw(logits_V, part.pending, 1)
        part.pending += drawn
        if log_q_V is not None:
            part.log_q.append(log_q_V)

    def _judge(
        self,
        part: Round,
        ahead: Ahead,
        tree: DraftTree,
        output: ForwardOutput,
        rows: slice,
        best_R: Sequence[int],
    ) -> None:
        """What the target with few keys makes of an inner draft; what it keeps is pending."""
        assert self._inner is not None
        assert self._arena is not None
        logits_RV = output.logits_RV[rows]
        verdict = self._inner.judge(ahead.sampler, tree, logits_RV, best_R)
        assert verdict is not None
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        end = next((i for i, token in enumerate(tokens) if token in ahead.end_ids), len(tokens) - 1)
        tokens, verdict = tokens[: end + 1], Verdict(verdict.path[:end], tokens[end], verdict.lossless)
        if self._inner.needs_q and not ahead.sampler.params.greedy:
            for place, node in enumerate((-1, *verdict.path)):
                part.log_q.append(ahead.sampler.probs(logits_RV[node + 1], tokens[:place]).log())
        past, kept = part.past, [0, *(1 + node for node in verdict.path)]
        first = part.lease.start + past
        self._arena.move([first + row for row in kept], first)
        part.pending += tokens
        ahead.tokens += tokens
        own = [rows.start + row for row in kept]
        hidden_TW = None if output.hidden_TW is None else output.hidden_TW[own]
        aux_TW = {layer: states_TW[own] for layer, states_TW in output.aux_TW.items()}
        choices = best_R if self._inner_needs.choices else ()
        self._inner.drafter.observe(
            ahead, Observed(past, len(kept), tree, verdict, hidden_TW, aux_TW, choices)
        )

    def _retract(self, request: DraftRequest, ahead: Ahead, length: int) -> None:
        """Takes tokens back from the inner drafter."""
        assert self._inner is not None
        drafter = self._inner.drafter
        if isinstance(drafter, RetractingDrafter):
            del ahead.tokens[length:]
            drafter.retract(ahead)
        else:
            drafter.finish(ahead)
            del ahead.tokens[length:]
            drafter.start(ahead)
        ahead.sampler = request.sampler.fork(ahead.tokens)


def _plain_step(seen: Observed, length: int, token: int) -> Observed:
    """A full pass as one that read token `length - 1` and answered `token`."""
    row = length - 1 - seen.start
    return replace(
        seen,
        start=length - 1,
        count=1,
        tree=EMPTY_TREE,
        verdict=Verdict((), token),
        hidden_TW=None if seen.hidden_TW is None else seen.hidden_TW[row : row + 1],
        aux_TW={layer: states_TW[row : row + 1] for layer, states_TW in seen.aux_TW.items()},
        choices=seen.choices[row : row + 1],
        queries={},
    )


def build(context: DrafterContext, argument: str | None, options: SelfOptions) -> SparseTargetDrafter:
    """See `DrafterEntry.build`.

    Raises:
        InputError: the budget is too small, or a given profile is of other models.
    """
    policy, own = POLICIES[options.kv], shape_of(context.target, context.name)
    profile = choose(context.kv_profile, own, own) if goes_by_profile(policy) else None
    reader = KVReader(policy, options.budget, context.target.num_layers, profile)
    return SparseTargetDrafter(context.target, reader, name=context.name)
