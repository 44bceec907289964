"""The HTTP interface: what is answered where.

/v1/chat/completions, /v1/completions, /v1/models   OpenAI's
/health, /metrics, /stats                           the server's own
/                                                   the page
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from foretell.engine.door import constraint_of
from foretell.errors import GrammarError, InputError
from foretell.server import errors, sse, static
from foretell.server.answers import Vocabulary, Writer, prompts_of
from foretell.server.errors import ApiError
from foretell.server.guard import ID_HEADER, Guard
from foretell.server.jobs import Job, JobFailed
from foretell.server.metrics import Metrics
from foretell.server.schemas import ChatRequest, CompletionRequest, Sampled
from foretell.server.settings import Settings
from foretell.server.snapshot import Shape, shape_of, snapshot
from foretell.server.worker import Worker

_log = logging.getLogger(__name__)
WARNING_HEADER = "X-Foretell-Warning"
_USER = 256  # characters of the field `user` that go to the log
_FIELDS = (*ChatRequest.model_fields, *CompletionRequest.model_fields)


class Service:
    """Answers requests with a worker.

    Args:
        worker: owns the LLM; started by the app.
        settings: limits.
        metrics: what the worker reports to.

    Attributes:
        draining: the server is about to stop; nothing new is taken.
    """

    def __init__(self, worker: Worker, settings: Settings, metrics: Metrics) -> None:
        self.worker, self.settings, self.metrics = worker, settings, metrics
        self.draining = False
        self._vocabulary: Vocabulary | None = None
        self._shape: Shape | None = None

    async def start(self) -> None:
        """Loads the model, once.

        Raises:
            InputError: it cannot be loaded.
        """
        if self._shape is not None:
            return
        await self.worker.start()
        llm = self.worker.llm
        self._vocabulary = await asyncio.to_thread(Vocabulary.of, llm)
        self._shape = shape_of(llm, self.settings)
        if not llm.engine.preempts:
            _log.warning(
                "an answer keeps slots for all of its max_tokens here, since its text may depend on when "
                "tokens are read: clients should set max_tokens"
            )

    @property
    def shape(self) -> Shape:
        """What does not change while the server runs."""
        assert self._shape is not None
        return self._shape

    async def drain(self) -> None:
        """Takes nothing new; waits for what runs, at most `grace` seconds; then ends it with an error."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.grace):
                while self.worker.answers:
                    await asyncio.sleep(0.02)
        if self.worker.answers:
            _log.warning("%d answers are cut off: the server stops", self.worker.answers)
            self.hurry()

    def hurry(self) -> None:
        """What still runs ends now, with an error."""
        self.worker.fail_all("the server is shutting down")

    def on_fatal(self, give_up: Callable[[], None]) -> None:
        """What to call when nothing can be answered any more."""
        self.worker.on_fatal = give_up

    async def answer(self, asked: Sampled, http: Request) -> Response:
        """A body of either kind.

        Raises:
            ApiError, InputError: it cannot be answered.
        """
        facts: dict[str, Any] = http.state.facts
        if asked.user is not None:
            facts["user"] = asked.user[:_USER]
        if asked.model not in (self.shape.model, self.shape.served):
            raise ApiError(
                404, f"there is no model {asked.model!r} here", param="model", code="model_not_found"
            )
        try:
            async with asyncio.timeout(self.settings.timeout) as limit:
                job, headers = await self._submit(asked)
        except GrammarError as error:
            raise ApiError(400, str(error), param=asked.constrained_by) from error
        except InputError as error:
            raise errors.from_input(error, _FIELDS) from error
        except (JobFailed, TimeoutError) as error:
            raise self._failed(error) from error
        assert self._vocabulary is not None
        writer = Writer(asked, self._vocabulary, self.shape.fingerprint)
        deadline = limit.when()
        assert deadline is not None
        if not asked.stream:
            return JSONResponse(await self._whole(job, writer, deadline, http), headers=headers)

        def end() -> None:
            self.worker.close(job)
            self._note(job, writer, facts)

        return sse.EventStream(self._events(job, writer, deadline, facts), end, headers)

    async def _submit(self, asked: Sampled) -> tuple[Job, dict[str, str]]:
        llm = self.worker.llm
        prompts = await asyncio.to_thread(prompts_of, asked, llm)
        # a prompt beyond the context is refused by the engine, with the numbers
        params = [asked.params(max(1, llm.engine.room(len(ids)))) for ids in prompts]
        idle = dict.fromkeys(reason for each in params for reason in llm.without_effect(each))
        if (
            grammar := params[0].grammar
        ) is not None:  # not on the engine's thread: others are answered there
            await asyncio.to_thread(constraint_of, grammar, constrain=llm.engine.constrain)
        job = await self.worker.submit(prompts, params, drafts=asked.foretell.draft)
        return job, {WARNING_HEADER: "; ".join(idle)} if idle else {}

    async def _whole(self, job: Job, writer: Writer, deadline: float, http: Request) -> dict[str, Any]:
        """Everything at once; a client that goes away ends it."""
        try:
            await sse.unless_gone(http.receive, _collect(job, writer, deadline))
        except (JobFailed, TimeoutError) as error:
            raise self._failed(error) from error
        finally:
            self.worker.close(job)
        self._note(job, writer, http.state.facts)
        return writer.whole(job)

    async def _events(
        self, job: Job, writer: Writer, deadline: float, facts: dict[str, Any]
    ) -> AsyncGenerator[bytes]:
        """The answers as they come; what goes wrong on the way is an event, too."""
        try:
            for value in writer.opening(job.answers):
                yield sse.event(value)
            async for piece in job.pieces(deadline):
                yield sse.event(writer.chunk(piece, job.requests[piece.index]))
            for value in writer.closing(job):
                yield sse.event(value)
            yield sse.DONE
        except (JobFailed, TimeoutError) as error:
            facts["error"] = str(error)
            yield sse.event(self._failed(error).to_json())

    def _failed(self, error: Exception) -> ApiError:
        if isinstance(error, JobFailed):
            return ApiError(error.status, str(error))
        return ApiError(504, f"the answer was not finished within {self.settings.timeout:g} s")

    def _note(self, job: Job, writer: Writer, facts: dict[str, Any]) -> None:
        """For the log."""
        facts |= writer.usage(job)
        facts["finish_reasons"] = [request.finish_reason for request in job.requests]
        facts["first_token_ms"] = [round(1000 * seconds, 1) for seconds in job.first_s.values()]


async def _collect(job: Job, writer: Writer, deadline: float) -> None:
    async for piece in job.pieces(deadline):
        writer.add(piece)


def create_app(worker: Worker, settings: Settings, metrics: Metrics) -> FastAPI:
    """The app over a worker, which it starts and stops; its `Service` is `app.state.service`."""
    service = Service(worker, settings, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await worker.stop()

    app = FastAPI(title="foretell", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    errors.install(app)
    _answers(app, service)
    _models(app, service)
    _operation(app, service)
    static.install(app)
    app.add_middleware(Guard, settings=settings, draining=lambda: service.draining)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(ID_HEADER, WARNING_HEADER),
        )
    return app


def _answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_errors(400, 401, 404, 408, 413, 429, 503, 504))
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answers a conversation."""
        return await service.answer(body, http)

    @app.post("/v1/completions", responses=_errors(400, 401, 404, 408, 413, 429, 503, 504))
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continues a prompt, or several."""
        return await service.answer(body, http)


def _models(app: FastAPI, service: Service) -> None:
    def facts() -> dict[str, Any]:
        shape = service.shape
        return {"id": shape.model, "object": "model", "created": shape.started, "owned_by": "foretell"}

    @app.get("/v1/models", responses=_errors(401, 503))
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [facts()]}

    @app.get("/v1/models/{name:path}", responses=_errors(401, 404, 503))
    async def model(name: str) -> dict[str, Any]:
        """The one model, by name."""
        if name != service.shape.model:
            raise ApiError(404, f"there is no model {name!r} here", param="model", code="model_not_found")
        return facts()


def _operation(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_errors(503))
    async def health() -> dict[str, str]:
        """Whether answers can be had."""
        if service.worker.fatal is not None:
            raise ApiError(503, service.worker.fatal)
        return {"status": "ok"}

    @app.get("/metrics", responses=_errors(401))
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", responses=_errors(401, 503))
    async def stats() -> dict[str, Any]:
        """The same for programs; see docs/serving.md."""
        try:
            return await service.worker.ask(lambda llm: snapshot(llm, service.shape, service.metrics))
        except JobFailed as error:
            raise ApiError(error.status, str(error)) from error


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    return {code: {"description": _REASONS[code]} for code in codes}


_REASONS = {
    400: "the request is wrong: see error.param and error.message",
    401: "the API key is missing or wrong",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too large",
    429: "the queue is full",
    503: "the server is shutting down",
    504: "the answer was not finished in time",
}
