"""Runs the app under uvicorn, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from foretell.errors import InputError

_BACKLOG = 512
_CLOSING = 5  # seconds that connections get to take the last bytes


class Service(Protocol):
    """What answers an app's requests; `app.state.service`."""

    async def start(self) -> None:
        """Makes it ready.

        Raises:
            InputError: it cannot be.
        """
        ...

    async def drain(self) -> None:
        """Takes nothing new, and returns when nothing runs any more."""
        ...

    def hurry(self) -> None:
        """What still runs ends now, with an error."""
        ...

    def on_fatal(self, give_up: Callable[[], None]) -> None:
        """What to call when nothing can be answered any more."""
        ...


class Server(uvicorn.Server):
    """uvicorn, but: told to stop, it lets running answers finish before connections are closed, and a signal
    that was obeyed is no failure.

    Args:
        app: by `create_app` or `create_front`.
        listener: a bound socket.
        ready: called when requests are answered.
        parent: the process without which this one ends, too.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        ready: Callable[[], None] = lambda: None,
        parent: int | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_CLOSING,
            server_header=False,
        )
        super().__init__(config)
        self._listener = listener
        self._ready = ready
        self._service: Service = app.state.service
        self.failed = False
        self._parent = parent
        self._service.on_fatal(self._give_up)

    def run_here(self) -> None:
        """Serves until a signal comes.

        Raises:
            InputError: the model cannot be loaded.
        """
        asyncio.run(self._whole_life())

    async def _whole_life(self) -> None:
        """Like `serve`, but what goes wrong while the model is loaded is raised as it is."""
        await self._service.start()
        await self.serve([self._listener])

    def _give_up(self) -> None:
        self.failed = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn."""
        if self._parent is not None and os.getppid() != self._parent:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await self._service.drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn; signals are not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; a second signal does not wait any longer."""
        if self.should_exit:
            self._service.hurry()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound before the model is loaded.

    Raises:
        InputError: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # only where the protocol is named does asyncio send small packets at once
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}", hint="choose another --port") from error
    return listener
