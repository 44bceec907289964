"""The thread that owns the `LLM`. Nobody else touches its engine: the event loop sends commands, which are
obeyed between two steps, and gets pieces of answers back, all of a step in one call."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from foretell.api import LLM
from foretell.engine import Request
from foretell.errors import RankError
from foretell.server.errors import ApiError
from foretell.server.jobs import Job, JobFailed, Piece
from foretell.server.metrics import Metrics
from foretell.types import SamplingParams

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FIRST_GUESS = 1.0  # seconds that an answer takes, before one was seen
_MEMORY = 0.9


class Worker:
    """Answers prompts on one `LLM`. Its methods belong to the event loop that called `start`.

    Args:
        make: builds the LLM; called on the worker's own thread.
        max_queue: answers that may wait beside those that can run.
        metrics: told of every step and answer.
    """

    def __init__(self, make: Callable[[], LLM], max_queue: int, metrics: Metrics) -> None:
        self._make = make
        self._max_queue = max_queue
        self._metrics = metrics
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[LLM] = Future()
        self._jobs: list[Job] = []  # of the worker's thread
        self._ending = False
        self._open: set[Job] = set()  # of the event loop
        self._seconds = _FIRST_GUESS  # that an answer takes, lately
        self.fatal: str | None = None  # why nothing can be answered any more
        self.on_fatal: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Loads the model.

        Raises:
            InputError: a bad argument, or a model that cannot be loaded.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._ready)

    async def stop(self) -> None:
        """Ends the thread; answers that still run fail."""
        self.fail_all("the server is shutting down")
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join)

    @property
    def llm(self) -> LLM:
        """For what never changes: names, tokenizer, limits."""
        return self._ready.result(timeout=0)

    @property
    def answers(self) -> int:
        """Answers that run or wait."""
        return sum(job.unfinished for job in self._open)

    @property
    def most(self) -> int:
        """Answers that may run or wait."""
        return self.llm.max_batch + self._max_queue

    async def submit(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *, drafts: bool = True
    ) -> Job:
        """Queues prompts; all of them or none.

        Args:
            drafts: False = their answers are decoded plainly.

        Raises:
            ApiError: there is no room in the queue.
            InputError: one of them is unusable.
            JobFailed: the worker has ended.
        """
        job = Job(sum(each.n for each in params))
        self._check_room(job.answers)
        self._open.add(job)
        try:
            await self._ask(lambda: self._begin(job, prompts, params, drafts))
        except BaseException:
            self.close(job)
            raise
        return job

    def close(self, job: Job) -> None:
        """The client wants no more of it, or has all: what still runs ends before the next step."""
        if not job.closed:
            job.closed = True
            self._open.discard(job)
            self._commands.put(lambda: self._abort(job))

    def fail_all(self, reason: str) -> None:
        """Ends every answer with an error."""
        for job in list(self._open):
            job.tell(JobFailed(reason, 503))

    async def ask(self, question: Callable[[LLM], _T]) -> _T:
        """What the LLM says between two steps.

        Raises:
            JobFailed: the worker has ended.
        """
        return await self._ask(lambda: question(self.llm))

    async def _ask(self, do: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():  # nobody waits any more
                return
            try:
                if self._ending:
                    raise JobFailed(self.fatal or "the server is shutting down", 503)
                future.set_result(do())
            except Exception as error:
                future.set_exception(error)

        if self._ending or not self._thread.is_alive():
            raise JobFailed(self.fatal or "the server is shutting down", 503)
        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _check_room(self, answers: int) -> None:
        if answers > self.most:
            raise ApiError(
                400, f"n asks for {answers} answers at once, this server takes at most {self.most}", param="n"
            )
        waiting = self.answers + answers - self.llm.max_batch
        if waiting > self._max_queue:
            self._metrics.refused()
            after = max(1, math.ceil(self._seconds * waiting / self.llm.max_batch))
            raise ApiError(
                429,
                f"{self.answers} answers run or wait, more than {self.most} are not taken; "
                f"try again in {after} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(after)},
            )

    # ---- on the worker's thread

    def _run(self) -> None:
        try:
            self._ready.set_result(self._make())
        except BaseException as error:  # whatever it is, it belongs to whoever waits for the model
            self._ready.set_exception(error)
            return
        try:
            self._work()
        except Exception as error:  # outside a step, which has told whom it concerns: nothing can go on
            _log.exception("the engine's thread has ended")
            self.fatal, self._ending = f"the engine has ended: {type(error).__name__}: {error}", True
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, [])
        try:
            for job in list(self._jobs):
                self._abort(job)
        finally:
            self._obey(wait=False)  # what was asked meanwhile is refused, not forgotten

    def _work(self) -> None:
        engine = self.llm.engine
        while not self._ending:
            self._obey(wait=engine.idle)
            if not engine.idle and not self._ending:
                self._step()

    def _end(self) -> None:
        self._ending = True

    def _obey(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                return

    def _begin(
        self, job: Job, prompts: Sequence[list[int]], params: Sequence[SamplingParams], drafts: bool
    ) -> None:
        try:
            for ids, each in zip(prompts, params, strict=True):
                for answer in range(each.n):
                    ends = self.llm.loaded.end_ids
                    job.requests.append(self.llm.engine.submit(ids, each, ends, answer, drafts=drafts))
        except BaseException:
            self._abort(job)
            raise
        self._jobs.append(job)

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            self.llm.engine.abort(request)
        if job in self._jobs:
            self._jobs.remove(job)
        self._metrics.load(self.llm.engine)  # no step may follow that would tell

    def _step(self) -> None:
        engine = self.llm.engine
        try:
            engine.step()
        except RankError as error:  # the ranks do not come together again
            _log.exception("the run over several ranks has ended")
            self.fatal, self._ending = str(error), True
        except Exception as error:  # those that it concerns have ended, and each of them is told
            _log.exception("a step failed")
            if error not in engine.failures:
                for request in list(engine.running):
                    engine.fail(request, error)
        self._metrics.step(engine)
        news: list[tuple[Job, Piece | JobFailed]] = []
        for job in list(self._jobs):
            news += self._news(job)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, news)

    def _news(self, job: Job) -> list[tuple[Job, Piece | JobFailed]]:
        """What the last step brought a job."""
        found: list[tuple[Job, Piece | JobFailed]] = []
        if self.fatal is not None:
            return [(job, JobFailed(self.fatal, 503))]
        for index, request in enumerate(job.requests):
            if request.error is not None:
                self._abort(job)
                return [(job, JobFailed(f"the step failed: {type(request.error).__name__}: {request.error}"))]
            if (request.lease is not None or request.finish_reason is not None) and request.has_news:
                found.append((job, self._piece(job, index, request)))
        if all(request.closed for request in job.requests):
            self._jobs.remove(job)
        return found

    def _piece(self, job: Job, index: int, request: Request) -> Piece:
        before = request.handed
        chunk = request.take()
        seconds = time.perf_counter() - job.came
        logprobs = tuple(request.logprobs[before : request.handed])
        return Piece(
            index,
            chunk.text,
            chunk.token_ids,
            chunk.origins,
            chunk.places,
            logprobs,
            seconds,
            chunk.finish_reason,
        )

    # ---- on the event loop

    def _deliver(self, news: Sequence[tuple[Job, Piece | JobFailed]]) -> None:
        for job, each in news:
            if isinstance(each, Piece) and not job.closed:
                self._measure(job, each)
            job.tell(each)
        if self.fatal is not None:
            self.fail_all(self.fatal)
            self.on_fatal()

    def _measure(self, job: Job, piece: Piece) -> None:
        """Times to the first token and between tokens; how long answers take."""
        if piece.token_ids:
            before = job.last_s.get(piece.index)
            job.last_s[piece.index] = piece.seconds
            if before is None:
                job.first_s[piece.index] = piece.seconds
                self._metrics.first_token(piece.seconds)
            else:
                self._metrics.gap((piece.seconds - before) / len(piece.token_ids), len(piece.token_ids))
        if piece.finish_reason is not None:
            job.unfinished -= 1
            self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * piece.seconds
            self._metrics.finished(piece.finish_reason, piece.seconds, job.requests[piece.index])
