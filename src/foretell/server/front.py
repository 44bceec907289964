"""One address in front of several replicas. Requests are passed on as they are, and answers as they come; a
replica that ends takes its requests with it, each with an error, and is started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from foretell.errors import InputError
from foretell.server import errors, sse
from foretell.server.errors import ApiError
from foretell.server.guard import ID_HEADER, Guard
from foretell.server.replicas import Replica
from foretell.server.routing import Router, blocks, total
from foretell.server.settings import Settings

REPLICA_HEADER = "X-Foretell-Replica"
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", ID_HEADER.lower()}
_LOST = "the replica that was answering has ended"


class Front:
    """The service of several replicas; see `Service` for what a server expects of it.

    Args:
        commands: how each replica is started.
        settings: limits; the replicas have their own, but the time for a body and its size are the front's.

    Attributes:
        draining: the server is about to stop.
    """

    def __init__(self, commands: Sequence[Sequence[str]], settings: Settings) -> None:
        self.settings = settings
        self.draining = False
        self._commands = commands
        self._router = Router()
        # a connection of its own per request: whether a replica is there shows before anything is sent
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)
        self.replicas: list[Replica] = []

    async def start(self) -> None:
        """Starts the replicas and waits until all are ready.

        Raises:
            InputError: one of them ended; it has said why.
        """
        if self.replicas:
            return
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._commands))
        own = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
        own["FORETELL_API_KEY"] = self.settings.api_key or ""
        self.replicas = [
            Replica(number, command, own, self._router.forget)
            for number, command in enumerate(self._commands)
        ]
        codes = await asyncio.gather(*(replica.started() for replica in self.replicas))
        if any(code is not None for code in codes):
            await self.stop()
            raise InputError(f"a replica did not start: exit codes {codes}")

    async def drain(self) -> None:
        """The replicas finish what they have, and end."""
        self.draining = True
        await self.stop()

    async def stop(self) -> None:
        """Ends the replicas."""
        await asyncio.gather(*(replica.stop(self.settings.grace) for replica in self.replicas))

    def hurry(self) -> None:
        """A second signal: nobody is waited for any longer."""
        for replica in self.replicas:
            if replica.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.pid, 15)

    def on_fatal(self, _give_up: Callable[[], None]) -> None:
        """A replica that cannot go on is started again; the front always can."""

    async def forward(self, http: Request) -> Response:
        """Passes a request on to the replica that suits it best; to another one, once, if that ends before it
        has said anything. A request that ends whoever takes it does not go round.

        Raises:
            ApiError: there is none, it has ended, or the client has gone.
        """
        body = await http.body()
        names, tried, lost = blocks(body), set[int](), 0
        while True:
            loads = {r.number: r.load for r in self.replicas if r.url and r.number not in tried}
            if not loads:
                raise ApiError(503, "no replica is ready", headers={"Retry-After": "5"})
            replica = self.replicas[self._router.rank(names, loads)[0]]
            replica.load += 1
            try:
                answer = await sse.unless_gone(http.receive, self._send(replica, http, body))
                break
            except httpx.ConnectError:  # nothing was sent: another one may answer
                replica.load -= 1
                tried.add(replica.number)
            except httpx.HTTPError as error:
                replica.load -= 1
                tried.add(replica.number)
                lost += 1
                if lost > 1:
                    raise ApiError(503, _LOST, headers={"Retry-After": "1"}) from error
            except BaseException:
                replica.load -= 1
                raise
        self._router.remember(replica.number, names)
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        headers[REPLICA_HEADER] = str(replica.number)

        def end() -> None:
            replica.load -= 1

        events = answer.headers.get("Content-Type", "").startswith(sse.EventStream.media_type)
        return sse.EventStream(_parts(answer, events=events), end, headers, answer.status_code)

    async def _send(self, replica: Replica, http: Request, body: bytes) -> httpx.Response:
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _HOP}
        headers[ID_HEADER] = http.state.facts["request_id"]
        query = f"?{http.url.query}" if http.url.query else ""
        request = self._client.build_request(
            http.method, f"{replica.url}{http.url.path}{query}", headers=headers, content=body
        )
        return await self._client.send(request, stream=True)

    async def ask(self, path: str) -> list[tuple[Replica, httpx.Response]]:
        """The answers of all replicas that are ready."""
        key = self.settings.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        ready = [replica for replica in self.replicas if replica.url]
        found = await asyncio.gather(
            *(self._client.get(f"{replica.url}{path}", headers=headers) for replica in ready),
            return_exceptions=True,
        )
        return [
            (replica, answer)
            for replica, answer in zip(ready, found, strict=True)
            if isinstance(answer, httpx.Response) and answer.status_code == 200
        ]


async def _parts(answer: httpx.Response, *, events: bool) -> AsyncGenerator[bytes]:
    """What comes from a replica; if it ends on the way, a stream ends with an error."""
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.HTTPError:
        yield (b"\n\n" if events else b"") + sse.event(ApiError(503, _LOST).to_json())
    finally:
        await answer.aclose()


def create_front(front: Front) -> FastAPI:
    """The app before several replicas; its service is `app.state.service`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.stop()

    app = FastAPI(title="foretell", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = front
    errors.install(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether any replica answers."""
        ready = sum(replica.url is not None for replica in front.replicas)
        if not ready:
            raise ApiError(503, "no replica is ready")
        return {"status": "ok", "replicas": ready}

    @app.get("/stats")
    async def stats() -> JSONResponse:
        """As of one server; see docs/serving.md."""
        return JSONResponse(_stats(front, await front.ask("/stats")))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Of all replicas, each with its number as a label."""
        registry = CollectorRegistry()
        registry.register(_Relabelled(await front.ask("/metrics")))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def rest(http: Request) -> Response:
        """Everything else is a replica's."""
        return await front.forward(http)

    app.add_middleware(Guard, settings=front.settings, draining=lambda: front.draining)
    return app


def _stats(front: Front, answers: Sequence[tuple[Replica, httpx.Response]]) -> dict[str, Any]:
    parts = [json.loads(answer.content) for _, answer in answers]
    listed = [
        {"number": r.number, "pid": r.pid, "ready": r.url is not None, "load": r.load, "restarts": r.restarts}
        for r in front.replicas
    ]
    if not parts:
        return {"replicas": listed}
    load = {name: sum(part["load"][name] for part in parts) for name in parts[0]["load"]}
    seconds = {name: sum(part["seconds"][name] for part in parts) for name in parts[0]["seconds"]}
    return {
        **parts[0],
        "load": load,
        "totals": total([part["totals"] for part in parts]),
        "seconds": seconds,
        "requests": [request for part in parts for request in part["requests"]],
        "replicas": listed,
    }


class _Relabelled:
    """Metrics of several servers, told apart by a label."""

    def __init__(self, answers: Sequence[tuple[Replica, httpx.Response]]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        families: dict[str, Metric] = {}
        for replica, answer in self._answers:
            for family in text_string_to_metric_families(answer.text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(replica.number)}
                    known.add_sample(sample.name, labels, sample.value)
        yield from families.values()
