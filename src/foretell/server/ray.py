"""The server as a Ray Serve application: `serve run foretell.server.ray:build model=smollm2-135m replicas=2`.

An entry takes HTTP and hands each request to one of the replicas, each of which runs the same app as
`foretell serve` on an LLM of its own. Requests go to replicas that have read their beginning before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message, Receive, Scope, Send

from foretell.api import LLM
from foretell.errors import InputError
from foretell.server.app import create_app
from foretell.server.errors import ApiError
from foretell.server.guard import ID_HEADER, read_body
from foretell.server.metrics import Metrics
from foretell.server.routing import Router, blocks
from foretell.server.settings import Settings
from foretell.server.worker import Worker

_SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "root_path",
)
ENGINE = "foretell-engine"
_OPEN = 10_000  # requests that the entry holds; the replicas say when there are too many
_BATCH = 16  # answers that an LLM runs at once, where nobody says otherwise
_SETTINGS = tuple(Settings.__dataclass_fields__)


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Routes by the beginnings that replicas have read; the first argument of a request names its own."""

    def initialize_state(self, **_options: Any) -> None:
        """See Ray."""
        self._router = Router()
        self._loads: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See Ray: the best one first; another where it cannot take more."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {each: self._loads.get(each, 0) for each in by_id}
        names = pending_request.args[0] if pending_request is not None and pending_request.args else []
        return [[by_id[each]] for each in self._router.rank(names, loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See Ray."""
        self._loads[replica_id] = self._loads.get(replica_id, 0) + 1
        if pending_request.args:
            self._router.remember(replica_id, pending_request.args[0])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See Ray."""
        self._loads[replica_id] = max(0, self._loads.get(replica_id, 0) - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See Ray."""
        super().on_replica_actor_died(replica_id)
        self._loads.pop(replica_id, None)
        self._router.forget(replica_id)


class Engine:
    """One replica: the app of `foretell serve`, called without a socket.

    Args:
        options: of `LLM`.
        settings: of `Settings`.
    """

    def __init__(self, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        chosen, metrics = Settings(**settings), Metrics()
        worker = Worker(lambda: LLM(**options), chosen.max_queue, metrics)
        self._app = create_app(worker, chosen, metrics)
        self._starting: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """See Ray: a replica that cannot answer any more is replaced."""
        await self._start()
        if (reason := self._app.state.service.worker.fatal) is not None:
            raise RuntimeError(reason)

    async def answer(self, _names: list[str], scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of one answer, as they come.

        Args:
            _names: for the router.
            scope: ASGI's, as far as it can be sent.
            body: the whole of it.
        """
        await self._start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": self._app}, receive, messages.put)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await running
        finally:
            left.set()  # the client has gone, or has everything
            await asyncio.gather(running, return_exceptions=True)

    async def _start(self) -> None:
        """Loads the model, once, whoever comes first."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._app.state.service.start())
        await asyncio.shield(self._starting)


class Entry:
    """An ASGI app that hands requests to replicas.

    Args:
        engines: the replicas.
        settings: bodies are read here, so their limit is kept here.
    """

    def __init__(self, engines: DeploymentHandle, settings: Settings) -> None:
        self._engines = engines.options(stream=True)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Ray itself names requests, in the same header."""
        if scope["type"] != "http":
            return
        try:
            body, _ = await read_body(scope, receive, self._settings)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        sent = {name: scope[name] for name in _SCOPE if name in scope}
        async for each in self._engines.answer.remote(blocks(body), sent, body):
            if each["type"] == "http.response.start":
                headers = [pair for pair in each["headers"] if pair[0].lower() != ID_HEADER.lower().encode()]
                each = {**each, "headers": headers}
            await send(each)


class _Ingress:
    """What Ray makes the entry of, when it has its arguments."""

    def __init__(self, engines: DeploymentHandle, settings: Settings) -> None:
        self._entry = Entry(engines, settings)

    def __serve_build_asgi_app__(self) -> Entry:
        return self._entry


def build(args: Mapping[str, Any]) -> Any:
    """The application, for `serve run foretell.server.ray:build KEY=VALUE ...` and `serve.run(build({...}))`.

    Args:
        args: options of `LLM` and of `Settings`; `replicas`, a number (1 where nothing is said), or
            `autoscaling`, Ray's autoscaling configuration; `actor`, Ray's options of each replica's actor
            (`num_cpus`, `num_gpus`).

    Raises:
        InputError: replicas and autoscaling are both given, or a setting is out of range.
    """
    given = dict(args)
    replicas, autoscaling = given.pop("replicas", None), given.pop("autoscaling", None)
    if replicas is not None and autoscaling is not None:
        raise InputError("replicas and autoscaling exclude each other", hint="give one of them")
    actor = given.pop("actor", {})
    settings = {name: given.pop(name) for name in _SETTINGS if name in given}
    chosen = Settings(**settings)
    scale = {"autoscaling_config": autoscaling} if autoscaling else {"num_replicas": int(replicas or 1)}
    engine = serve.deployment(
        Engine,
        name=ENGINE,
        max_ongoing_requests=int(given.get("max_batch", _BATCH)) + chosen.max_queue,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options=actor,
        **scale,
    )
    bound = engine.bind(given, settings)

    entry = serve.deployment(name="foretell", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_OPEN)
    return entry(serve.ingress()(_Ingress)).bind(bound, chosen)
