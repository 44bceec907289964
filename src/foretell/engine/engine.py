"""The step: plan, draft, verify in one forward pass, commit, emit. Every request, whatever its state
and drafter, goes through it; a prompt is a long chain of pending tokens, plain decoding an empty draft.

Shape suffixes: R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from secrets import randbits

from torch import Tensor

from foretell.attention import Segment, pack
from foretell.cache import KVCache, Lease
from foretell.drafters import AttendingDrafter, BorrowingDrafter, Drafter, looks_ahead
from foretell.engine.accounting import Accounts, Clock
from foretell.engine.detokenize import Detokenizer
from foretell.engine.door import check, constraint_of
from foretell.engine.request import PLAIN, Request
from foretell.engine.scheduler import Scheduler
from foretell.engine.verification import likeliest, verify
from foretell.engine.work import Work, emit, observed
from foretell.models.base import ForwardOutput, TargetModel
from foretell.planner import Planner, StepReport
from foretell.sampling import Constraint, Sampler
from foretell.sparse import Reader
from foretell.stats import StepStats
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, Grammar, SamplingParams, Verdict
from foretell.verify import Rule

_log = logging.getLogger(__name__)


class Engine:
    """Runs requests on one target with one drafter.

    Args:
        target: the model whose answers are wanted.
        drafter: where proposals come from.
        rule: how they are judged.
        planner: how many are made.
        decode: ids to text; None = requests have no text (and no stop strings).
        constrain: what a grammar allows of this target's tokens; None = requests have no grammar.
        kv_slots: tokens of all running requests that the KV cache holds.
        max_batch: requests that run at once.
        prefill_chunk: tokens of prompts that one step reads; fewer while others are answering.
        reader: what decoding steps read of their histories, lossy; None = everything. Prompts are read whole.

    A request whose part of a step raises ends with the reason "error"; where it cannot be told whose fault
    it is, all requests of the step do. `step` then raises, and may be called again.

    Attributes:
        planner: see there.
        last: what the last step did.
        lossy: whether decoding reads less than everything.
        preempts: whether a request may be put back, and reserves no more than it needs soon.
        constrain: see there; may be called on any thread.
        failures: what ended requests in the last step.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        rule: Rule,
        planner: Planner,
        *,
        decode: Callable[[Sequence[int]], str] | None,
        constrain: Callable[[Grammar], Constraint] | None = None,
        kv_slots: int,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        reader: Reader | None = None,
    ) -> None:
        self.target, self.rule, self.planner = target, rule, planner
        self.cache = KVCache(target.new_arena(kv_slots))
        self.last: StepReport | None = None
        self.lossy = reader is not None
        self._accounts = Accounts(drafter.expects)
        self._drafter = drafter
        self._decode = decode
        self.constrain = constrain
        self._reader = reader
        self._needs = drafter.needs | (NO_NEEDS if reader is None else reader.needs)
        if isinstance(drafter, BorrowingDrafter):
            drafter.borrow(self.cache.arena)
        self._looks_ahead = reader is not None and looks_ahead(drafter, reader)
        # a draft that comes out otherwise after a prefix hit changes no text under an invariant rule, and
        # reading emitted tokens again is no other text
        self.preempts = free = reader is None and rule.invariant
        reuse, again = not self._needs.prompts or free, self._needs.again
        self._scheduler = Scheduler(
            self.cache, max_batch, planner.max_draft, reuse=reuse, preempts=free, again=again
        )
        self._prefill_chunk = prefill_chunk
        self._ids = itertools.count()
        self._started: set[int] = set()  # requests that drafter and reader follow
        self.failures: list[Exception] = []

    @property
    def stats(self) -> StepStats:
        """Totals over all requests; the seconds are those of all steps, prompts included."""
        return self._accounts.stats

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._scheduler.idle

    @property
    def running(self) -> Sequence[Request]:
        """Requests that have slots."""
        return self._scheduler.running

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that wait for slots, in turn."""
        return self._scheduler.waiting

    def room(self, prompt: int) -> int:
        """Tokens that an answer to a prompt of so many tokens can have; below 1 = it does not fit."""
        return min(self.target.max_context, self.cache.arena.slots - self.planner.max_draft) - prompt

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        answer: int = 0,
        *,
        drafts: bool = True,
    ) -> Request:
        """Queues a prompt.

        Args:
            prompt: token ids.
            params: how to sample.
            end_ids: the model's end tokens.
            answer: index among `params.n` answers; moves the seed.
            drafts: False = it is decoded plainly.

        Raises:
            InputError: empty prompt, ids outside the vocabulary, no room in context or cache, a grammar that
                cannot be met.
        """
        check(prompt, params, self.target, has_text=self._decode is not None)
        tokens = list(prompt)
        ends = (frozenset() if params.ignore_eos else end_ids) | params.stop_ids
        seed = randbits(63) if params.seed is None else params.seed
        seed = (seed + answer * 0x9E3779B97F4A7C15) % (1 << 63)
        request = Request(
            id=next(self._ids),
            params=params,
            prompt_length=len(tokens),
            tokens=tokens,
            capacity=len(tokens) + params.max_tokens + self.planner.max_draft,
            end_ids=ends,
            sampler=Sampler(
                params,
                tokens,
                len(tokens),
                seed,
                ends,
                draft_stream=self.rule.draft_stream,
                needs_q=self.rule.needs_q,
                constraint=constraint_of(params.grammar, constrain=self.constrain),
            ),
            detokenizer=None if self._decode is None else Detokenizer(self._decode),
            seed=seed,
            drafts=drafts,
        )
        self._scheduler.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request now; its slots are free for the next step."""
        if request.finish_reason is None:
            request.finish("abort")
            self._end(request)
            self.planner.forget(request.id)

    def forget(self) -> None:
        """Drops what finished requests have left, here and in the drafter: the next one finds nothing."""
        self.cache.forget()
        self._drafter.forget()

    def step(self) -> list[Request]:
        """Advances running requests by one forward pass; returns those that emitted tokens.

        What they emitted waits in the request (`Request.take`), whoever called for the step.

        Raises:
            Exception: what a request's part of it raised, when the others have advanced.
        """
        clock = Clock()
        self.failures = []
        self._admit()
        shares = self._scheduler.shares(self._prefill_chunk)
        advanced = self._pass(shares, clock) if shares else []
        if self.failures:
            raise self.failures[0]
        return advanced

    def _pass(self, shares: Sequence[tuple[Request, int]], clock: Clock) -> list[Request]:
        """The step of requests that read so many tokens each."""
        try:
            trees, proposed = self._draft(shares)
            work = self._place(shares, trees)
            clock.lap("draft_s")
            batch = pack([w.segment for w in work], self.cache.arena)
            output = self.target.forward(batch, self._needs)
            clock.lap("target_s")
            best_R = likeliest(output.logits_RV)
        except Exception as error:
            for request, _ in shares:
                self.fail(request, error)
            return []
        verdicts = [self._verify(part, output, best_R) for part in work]
        clock.lap("verify_s")
        advanced = self._settle(work, verdicts, output, best_R)
        clock.lap("rest_s")
        self._accounts.book([*self.running, *(w.request for w in work if w.request.finish_reason)], clock)
        self._report(work, verdicts, proposed, clock)
        return advanced

    def _admit(self) -> None:
        """Tells drafter and reader who comes and goes."""
        changes = self._scheduler.begin()
        self.stats.preempted += len(changes.put_back)
        for request in changes.put_back:
            self._leave(request)
        for request in changes.admitted:
            with self._blaming(request):
                self._started.add(request.id)
                self._drafter.start(request)
                if self._reader is not None:
                    self._reader.start(request.id, request.prompt_length)

    @contextmanager
    def _blaming(self, request: Request) -> Iterator[None]:
        """What is raised inside is this request's fault alone."""
        try:
            yield
        except Exception as error:
            self.fail(request, error)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error."""
        self.failures.append(error)
        if request.finish_reason is None:
            request.error = error
            request.finish("error")
            self._end(request)
            self.planner.forget(request.id)

    def _verify(self, part: Work, output: ForwardOutput, best_R: Sequence[int]) -> Verdict | None:
        with self._blaming(part.request):
            sampler, rows = part.request.sampler, part.rows
            return verify(self.rule, sampler, part.tree, output.logits_RV[rows], best_R[rows])
        return None

    def _draft(self, shares: Sequence[tuple[Request, int]]) -> tuple[dict[int, DraftTree], int]:
        """What is verified per request, nothing for those whose prompt is still being read; and how many
        tokens were proposed."""
        ready = [request for request, share in shares if share == request.unread]
        planned = zip(ready, self.planner.plan(ready), strict=True)
        plans = [plan if request.drafts else PLAIN for request, plan in planned]
        trees = self._drafter.propose(ready, plans)
        for request, plan, tree in zip(ready, plans, trees, strict=True):
            request.plan = plan
            for stats in (request.stats, self.stats):
                stats.plans[plan.reason] = stats.plans.get(plan.reason, 0) + 1
            with self._blaming(request):
                most = max(plan.draft_tokens, plan.free_tokens)
                if len(tree) > most or any(not 0 <= t < self.target.vocab_size for t in tree.tokens):
                    name = type(self._drafter).__name__
                    raise ValueError(f"{name} drafted {tree.tokens} where {most} tokens were asked for")
        drafted = [(r, t) for r, t in zip(ready, trees, strict=True) if r.finish_reason is None]
        rows = sum(share for _, share in shares)
        kept = self.planner.choose([r for r, _ in drafted], [t for _, t in drafted], rows)
        found = {request.id: tree for (request, _), tree in zip(drafted, kept, strict=True)}
        return found, sum(map(len, trees))

    def _report(
        self, work: Sequence[Work], verdicts: Sequence[Verdict | None], proposed: int, clock: Clock
    ) -> None:
        """Tells the planner what the step did; an ended request after its last step."""
        judged = [
            (part.request.id, part.tree, verdict.path)
            for part, verdict in zip(work, verdicts, strict=True)
            if verdict is not None
        ]
        prompt_rows = sum(n for part in work if (n := len(part.segment.pending)) > 1)
        rows = sum(part.segment.rows for part in work)
        self.last = StepReport(rows, prompt_rows, proposed, **clock.laps, judged=judged)
        self.planner.observe(self.last)
        for part in work:
            if part.request.finish_reason is not None:
                self.planner.forget(part.request.id)

    def _place(self, shares: Sequence[tuple[Request, int]], trees: Mapping[int, DraftTree]) -> list[Work]:
        work: list[Work] = []
        row = 0
        for request, share in shares:
            with self._blaming(request):
                if (lease := request.lease) is None:
                    continue
                complete, tree = share == request.unread, trees.get(request.id, EMPTY_TREE)
                segment = Segment(
                    lease.start,
                    lease.length,
                    request.tokens[lease.length : lease.length + share],
                    tree.tokens,
                    tree.parents,
                    logits=complete,
                    selected=self._select(request, lease),
                )
                if request.emitted:
                    read = lease.length if segment.selected is None else len(segment.selected)
                    request.stats.kv_read += read
                    self.stats.kv_read += read
                count = 1 + len(tree) if complete else 0
                work.append(Work(request, tree, segment, slice(row, row + count)))
                row += count
        return work

    def _select(self, request: Request, lease: Lease) -> Tensor | None:
        """The places of its history that the request's rows read; None = all."""
        if self._reader is None or not request.emitted:
            return None
        ahead_N = None
        if self._looks_ahead and isinstance(self._drafter, AttendingDrafter):
            ahead_N = self._drafter.draft_attention(request, lease.length)
        return self._reader.select(request.id, self.cache.arena, lease, ahead_N)

    def _settle(
        self,
        work: Sequence[Work],
        verdicts: Sequence[Verdict | None],
        output: ForwardOutput,
        best_R: Sequence[int],
    ) -> list[Request]:
        """Commits what was kept, emits it, shows it to the drafter; ends what is finished."""
        advanced = []
        first_row = 0
        for part, verdict in zip(work, verdicts, strict=True):
            with self._blaming(part.request):
                if part.request.finish_reason is None:  # else its verification failed
                    self._settle_one(part, verdict, output, best_R, first_row)
                    advanced += [part.request] if verdict is not None else []
            first_row += part.segment.rows
        return advanced

    def _settle_one(
        self,
        part: Work,
        verdict: Verdict | None,
        output: ForwardOutput,
        best_R: Sequence[int],
        first_row: int,
    ) -> None:
        request, lease, pending = part.request, part.request.lease, len(part.segment.pending)
        assert lease is not None
        start = lease.length
        rows = [*range(pending), *(pending + node for node in (verdict.path if verdict else ()))]
        self.cache.commit(lease, rows)
        if part.segment.selected is not None and lease.exact is None:
            lease.exact = start
        seen_rows = [first_row + row for row in rows]
        if self._reader is not None:
            self._reader.observe(request.id, output.queries, seen_rows, self.cache.arena, lease)
        if verdict is not None:
            emit(part, verdict, output.logits_RV[part.rows], self.stats)
        if request.finish_reason is None:
            choices = best_R[part.rows] if self._drafter.needs.choices else ()
            layers = self._drafter.needs.queries
            seen = observed(part, verdict, start, seen_rows, output, choices, layers)
            self._drafter.observe(request, seen)
        else:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Drafter and reader forget the request."""
        if request.id not in self._started:
            return
        self._started.discard(request.id)
        try:
            self._drafter.finish(request)
        except Exception:  # its answer is complete all the same
            _log.exception("the drafter could not let go of request %d", request.id)
        if self._reader is not None:
            self._reader.finish(request.id)
