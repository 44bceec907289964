"""What stands before the app: request ids, access log, keys, and the limit of bodies. Plain ASGI, so that
streams pass through untouched and the app still hears of clients that go away."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.server.errors import ApiError
from foretell.server.settings import Settings
from foretell.server.static import PREFIX

ID_HEADER = "X-Request-Id"
OPEN = ("/", "/health")  # what needs no key
_LONGEST_ID = 128

access = logging.getLogger("foretell.server.access")


class Guard:
    """Wraps the app.

    Args:
        app: what is guarded.
        settings: key, body limit and time limit.
        draining: whether the server is about to stop.
    """

    def __init__(self, app: ASGIApp, settings: Settings, draining: Callable[[], bool]) -> None:
        self._app = app
        self._settings = settings
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(ID_HEADER))
        facts: dict[str, Any] = {"request_id": request_id}
        scope.setdefault("state", {})["facts"] = facts
        start, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID_HEADER.encode(), request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, receive, answer)
        finally:
            facts |= {"method": scope["method"], "path": scope["path"], "status": status or 500}
            facts["ms"] = round(1000 * (time.perf_counter() - start), 1)
            access.info(
                "%(method)s %(path)s %(status)s %(ms)s ms %(request_id)s", facts, extra={"facts": facts}
            )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._draining() and scope["path"] != "/metrics":
                raise ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
            self._check_key(scope)
            _, receive = await read_body(scope, receive, self._settings)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        key = self._settings.api_key
        if (
            key is None
            or scope["path"] in OPEN
            or scope["path"].startswith(PREFIX)
            or scope["method"] == "OPTIONS"
        ):
            return
        kind, _, given = Headers(scope=scope).get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(
                401,
                "this server wants its API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> tuple[bytes, Receive]:
    """Reads the body up to the limit. Also returns what goes on in `receive`'s place: it gives the body once
    more, and then what comes after it (a client that goes away).

    Raises:
        ApiError: it is too large, or too slow.
    """
    most = settings.max_body
    told = Headers(scope=scope).get("Content-Length", "")
    if told.isascii() and told.isdigit() and int(told) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.timeout):
            while (message := await receive())["type"] == "http.request":
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise _too_large(most)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.timeout:g} s") from None
    body = b"".join(parts)
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return body, replay


def _too_large(most: int) -> ApiError:
    # the rest of the body is not read, so the connection cannot be used again
    return ApiError(413, f"the body has more than {most} bytes", headers={"Connection": "close"})


def _request_id(given: str | None) -> str:
    """The client's, if it is printable and not too long; else a new one."""
    if given and len(given) <= _LONGEST_ID and given.isascii() and given.isprintable():
        return given
    return f"req-{uuid.uuid4().hex}"
