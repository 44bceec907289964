"""The step: plan, draft, verify in one forward pass, commit, emit. Every request, whatever its state
and drafter, goes through it; a prompt is a long chain of pending tokens, plain decoding an empty draft.

Shape suffixes: R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import randbits

from torch import Tensor

from foretell.attention import Segment, pack
from foretell.cache import KVCache, Lease
from foretell.drafters import AttendingDrafter, BorrowingDrafter, Drafter, Observed, looks_ahead
from foretell.engine.detokenize import Detokenizer
from foretell.engine.request import Request, Source
from foretell.engine.scheduler import Scheduler
from foretell.engine.verification import likeliest, verify
from foretell.errors import InputError
from foretell.models.base import ForwardOutput, TargetModel
from foretell.planner import Planner, StepReport
from foretell.sampling import Constraint, Sampler
from foretell.sparse import Reader
from foretell.stats import StepStats
from foretell.types import EMPTY_TREE, NO_NEEDS, DraftTree, Grammar, SamplingParams, Verdict
from foretell.verify import Rule

_log = logging.getLogger(__name__)
_DRAFTS_BEFORE_ALARM = 50


@dataclass(frozen=True, slots=True)
class _Work:
    """One request's part of a step. `rows` index the step's logits."""

    request: Request
    tree: DraftTree
    segment: Segment
    rows: slice


@dataclass(slots=True)
class _Clock:
    """Seconds of the phases of one step."""

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


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
        prefill_chunk: tokens of a prompt that one step reads.
        reader: what decoding steps read of their histories, lossy; None = everything. Prompts are read whole.

    Attributes:
        stats: totals over all requests; the seconds are those of all steps, prompts included.
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
        self.target = target
        self.rule = rule
        self.cache = KVCache(target.new_arena(kv_slots))
        self.stats = StepStats()
        self._drafter = drafter
        self._planner = planner
        self._decode = decode
        self._constrain = constrain
        self._reader = reader
        self._needs = drafter.needs | (NO_NEEDS if reader is None else reader.needs)
        if isinstance(drafter, BorrowingDrafter):
            drafter.borrow(self.cache.arena)
        self._looks_ahead = reader is not None and looks_ahead(drafter, reader)
        # a draft that comes out otherwise after a prefix hit changes no text under an invariant rule
        reuse = not self._needs.prompts or (reader is None and rule.invariant)
        self._scheduler = Scheduler(self.cache, max_batch, reuse=reuse)
        self._prefill_chunk = prefill_chunk
        self._ids = itertools.count()
        self._alarmed = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._scheduler.idle

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, end_ids: frozenset[int], answer: int = 0
    ) -> Request:
        """Queues a prompt.

        Args:
            prompt: token ids.
            params: how to sample.
            end_ids: the model's end tokens.
            answer: index among `params.n` answers; moves the seed.

        Raises:
            InputError: empty prompt, ids outside the vocabulary, no room in context or cache, a grammar that
                cannot be met.
        """
        self._check(prompt, params)
        tokens = list(prompt)
        ends = (frozenset() if params.ignore_eos else end_ids) | params.stop_ids
        seed = randbits(63) if params.seed is None else params.seed
        seed = (seed + answer * 0x9E3779B97F4A7C15) % (1 << 63)
        request = Request(
            id=next(self._ids),
            params=params,
            prompt_length=len(tokens),
            tokens=tokens,
            capacity=len(tokens) + params.max_tokens + self._planner.max_draft,
            end_ids=ends,
            sampler=Sampler(
                params,
                tokens,
                len(tokens),
                seed,
                ends,
                draft_stream=self.rule.draft_stream,
                needs_q=self.rule.needs_q,
                constraint=self._constraint(params.grammar),
            ),
            detokenizer=None if self._decode is None else Detokenizer(self._decode),
            seed=seed,
        )
        self._scheduler.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request now; its slots are free for the next step."""
        if request.finish_reason is None:
            request.finish("abort")
            self._end(request)
            self._planner.forget(request.id)

    def forget(self) -> None:
        """Drops what finished requests have left, here and in the drafter: the next one finds nothing."""
        self.cache.forget()
        self._drafter.forget()

    def step(self) -> list[Request]:
        """Advances every running request by one forward pass; returns those that emitted tokens.

        What they emitted waits in the request (`Request.take`), whoever called for the step.
        """
        clock = _Clock()
        for request in self._scheduler.admit():
            self._drafter.start(request)
            if self._reader is not None:
                self._reader.start(request.id, request.prompt_length)
        running = list(self._scheduler.running)
        if not running:
            return []
        trees, proposed = self._draft(running)
        work = self._place(running, trees)
        clock.lap("draft_s")
        output = self.target.forward(pack([w.segment for w in work], self.cache.arena), self._needs)
        clock.lap("target_s")
        best_R = likeliest(output.logits_RV)
        verdicts = [
            verify(self.rule, w.request.sampler, w.tree, output.logits_RV[w.rows], best_R[w.rows])
            for w in work
        ]
        clock.lap("verify_s")
        advanced = self._settle(work, verdicts, output, best_R)
        clock.lap("rest_s")
        self._account(running, clock)
        self._report(work, verdicts, proposed, clock)
        return advanced

    def _constraint(self, grammar: Grammar | None) -> Constraint | None:
        if grammar is not None and self._constrain is None:
            raise InputError("a grammar needs a tokenizer")
        return None if grammar is None or self._constrain is None else self._constrain(grammar)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise InputError("the prompt is empty: it has no tokens")
        context, vocabulary = self.target.max_context, self.target.vocab_size
        if len(prompt) >= context:
            raise InputError(f"the prompt has {len(prompt)} tokens, the model's context holds {context}")
        if len(prompt) + params.max_tokens > context:
            raise InputError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) exceed the model's "
                f"context of {context}",
                hint=f"max_tokens can be at most {context - len(prompt)}",
            )
        if bad := [token for token in prompt if not 0 <= token < vocabulary]:
            raise InputError(f"prompt token {bad[0]} is outside the vocabulary of {vocabulary}")
        for name, ids in (("logit_bias", params.logit_bias), ("stop", params.stop_ids)):
            if bad := [token for token in ids if token >= vocabulary]:
                raise InputError(f"{name} token {bad[0]} is outside the vocabulary of {vocabulary}")
        if self._decode is None and params.stop_strings:
            raise InputError("stop strings need a tokenizer")

    def _draft(self, running: Sequence[Request]) -> tuple[list[DraftTree], int]:
        """What is verified per request, nothing for those whose prompt is still being read; and how many
        tokens were proposed."""
        ready = [request for request in running if request.unread <= self._prefill_chunk]
        plans = self._planner.plan(ready)
        trees = self._drafter.propose(ready, plans)
        for request, plan, tree in zip(ready, plans, trees, strict=True):
            most = max(plan.draft_tokens, plan.free_tokens)
            if len(tree) > most or any(not 0 <= t < self.target.vocab_size for t in tree.tokens):
                name = type(self._drafter).__name__
                raise ValueError(f"{name} drafted {tree.tokens} where {most} tokens were asked for")
            request.stats.plans[plan.reason] = request.stats.plans.get(plan.reason, 0) + 1
        rows = sum(min(request.unread, self._prefill_chunk) for request in running)
        kept = self._planner.choose(ready, trees, rows)
        by_id = {request.id: tree for request, tree in zip(ready, kept, strict=True)}
        return [by_id.get(request.id, EMPTY_TREE) for request in running], sum(map(len, trees))

    def _report(
        self, work: Sequence[_Work], verdicts: Sequence[Verdict | None], proposed: int, clock: _Clock
    ) -> None:
        """Tells the planner what the step did; an ended request after its last step."""
        judged = [
            (part.request.id, part.tree, verdict.path)
            for part, verdict in zip(work, verdicts, strict=True)
            if verdict is not None
        ]
        prompt_rows = sum(n for part in work if (n := len(part.segment.pending)) > 1)
        rows = sum(part.segment.rows for part in work)
        self._planner.observe(StepReport(rows, prompt_rows, proposed, **clock.laps, judged=judged))
        for part in work:
            if part.request.finish_reason is not None:
                self._planner.forget(part.request.id)

    def _place(self, running: Sequence[Request], trees: Sequence[DraftTree]) -> list[_Work]:
        work: list[_Work] = []
        row = 0
        for request, tree in zip(running, trees, strict=True):
            lease = request.lease
            assert lease is not None
            pending = request.tokens[lease.length :][: self._prefill_chunk]
            complete = len(pending) == request.unread
            segment = Segment(
                lease.start,
                lease.length,
                pending,
                tree.tokens,
                tree.parents,
                logits=complete,
                selected=self._select(request, lease),
            )
            count = 1 + len(tree) if complete else 0
            if request.emitted:
                read = lease.length if segment.selected is None else len(segment.selected)
                request.stats.kv_read += read
                self.stats.kv_read += read
            work.append(_Work(request, tree, segment, slice(row, row + count)))
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
        work: Sequence[_Work],
        verdicts: Sequence[Verdict | None],
        output: ForwardOutput,
        best_R: Sequence[int],
    ) -> list[Request]:
        """Commits what was kept, emits it, shows it to the drafter; ends what is finished."""
        advanced = []
        first_row = 0
        for part, verdict in zip(work, verdicts, strict=True):
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
                self._emit(part, verdict, output.logits_RV[part.rows])
                advanced.append(request)
            if request.finish_reason is None:
                choices = best_R[part.rows] if self._drafter.needs.choices else ()
                layers = self._drafter.needs.queries
                seen = _observed(part, verdict, start, seen_rows, output, choices, layers)
                self._drafter.observe(request, seen)
            else:
                self._end(request)
            first_row += part.segment.rows
        return advanced

    def _emit(self, part: _Work, verdict: Verdict, logits_RV: Tensor) -> None:
        """Emits the accepted tokens and the next one, up to where the answer ends."""
        request, before, accepted = part.request, part.request.emitted, 0
        tokens = [*(part.tree.tokens[node] for node in verdict.path), verdict.next_token]
        for index, (token, above) in enumerate(zip(tokens, (-1, *verdict.path), strict=True)):
            drafted = index < len(verdict.path)
            accepted += drafted
            source = Source(part.tree.origin if drafted else -1, index + 1)
            if reason := request.emit(token, logits_RV[above + 1], source):
                request.finish(reason)
                break
        emitted = request.emitted - before  # negative where a stop string took back earlier tokens
        for stats in (request.stats, self.stats):
            stats.record(part.tree, max(0, min(accepted, emitted)), emitted)
        if request.stats.steps == 1:
            request.stats.first_emitted = emitted
        request.lossless = request.lossless and verdict.lossless and part.segment.selected is None

    def _end(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._drafter.finish(request)
        if self._reader is not None:
            self._reader.finish(request.id)

    def _account(self, running: Sequence[Request], clock: _Clock) -> None:
        """Books the step's seconds; each request is charged for the whole step, which it waited for."""
        for request in running:
            if request.stats.steps <= 1:
                request.stats.prefill_s += sum(clock.laps.values())
        for stats in (*(r.stats for r in running if r.stats.steps > 1), self.stats):
            for name, seconds in clock.laps.items():
                setattr(stats, name, getattr(stats, name) + seconds)
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        """A drafter that is almost never right is mis-wired, which nothing else would show."""
        stats = self.stats
        if self._alarmed or stats.drafts < _DRAFTS_BEFORE_ALARM or not stats.accepted_at:
            return
        if stats.marginal[0] < self._drafter.expects:
            self._alarmed = True
            _log.warning(
                "only %.1f %% of the drafts' first tokens were accepted (%d drafts): the drafter does not "
                "fit this target; the output is right, but speculation costs time",
                100 * stats.marginal[0],
                stats.drafts,
            )


def _observed(
    part: _Work,
    verdict: Verdict | None,
    start: int,
    rows: list[int],
    output: ForwardOutput,
    choices: Sequence[int],
    layers: Sequence[int],
) -> Observed:
    hidden_TW = None if output.hidden_TW is None else output.hidden_TW[rows]
    aux_TW = {layer: states_TW[rows] for layer, states_TW in output.aux_TW.items()}
    queries = {layer: output.queries[layer].at(rows) for layer in layers}
    return Observed(start, len(rows), part.tree, verdict, hidden_TW, aux_TW, choices, queries)
