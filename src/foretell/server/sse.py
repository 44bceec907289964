"""Server-sent events: one JSON document per event."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foretell.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_T = TypeVar("_T")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> bytes:
    """A document as an event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(ApiError):
    """The client went away; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(499, "the client went away")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; a client that goes away ends it.

    Raises:
        ClientGone: it has.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come, until they end or the client goes away.

    Args:
        events: what is sent; closed in any case.
        on_end: called at the end, however it came.
        status: of HTTP.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
        status: int = 200,
    ) -> None:
        super().__init__(status_code=status, headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            self._on_end()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
