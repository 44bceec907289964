"""Processes that each run a server of their own, kept alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)
PARENT = "FORETELL_PARENT"  # names the process without which a replica ends
_READY = re.compile(r"(http://127\.0\.0\.1:\d+)/v1 is ready")
_LINE = 1 << 24  # bytes of a line of its log
_START_S = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a process that ended is started again
_HEALTHY_S = 60.0  # after which it counts as one that runs
_KILL_S = 10.0  # beyond the grace that a replica has


class Replica:
    """One process, started again whenever it ends.

    Args:
        number: in logs.
        command: of `foretell`, without host and port.
        environment: added to this process's own.
        on_end: called when the process has ended.

    Attributes:
        url: where it listens; None = it is not ready.
        load: requests that it is answering.
        pid, restarts: of the process, and how often it was started again.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: dict[str, str], on_end: Callable[[int], None]
    ) -> None:
        self.number = number
        self.url: str | None = None
        self.load = self.restarts = 0
        self.pid: int | None = None
        self._command = command
        self._environment = {**os.environ, **environment, PARENT: str(os.getpid())}
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._first: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive())

    async def started(self) -> int | None:
        """Waits until it is ready for the first time: None; or its exit code, if it ended before."""
        async with asyncio.timeout(_START_S):
            return await asyncio.shield(self._first)

    async def stop(self, seconds: float) -> None:
        """Tells it to end in order; kills it after so many seconds and some more."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(seconds + _KILL_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
        self._task.cancel()

    async def _keep_alive(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping:
            begun = time.monotonic()
            try:
                code = await self._run()
            except OSError as error:  # no memory or processes left: as one that ended at once
                _log.error("replica %d cannot be started: %s", self.number, error)
                code = os.EX_OSERR
            self.url = self.pid = None
            self._on_end(self.number)
            if not self._first.done():
                self._first.set_result(code)
                return
            if self._stopping:
                return
            pause = _FIRST_PAUSE if time.monotonic() - begun > _HEALTHY_S else min(2 * pause, _LONGEST_PAUSE)
            _log.error("replica %d ended with code %d; it starts again in %g s", self.number, code, pause)
            self.restarts += 1
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "foretell",
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE,
            env=self._environment,
            start_new_session=True,  # a terminal's Ctrl-C goes to the front, which ends them in order
        )
        self._process, self.pid = process, process.pid
        assert process.stderr is not None
        ready = False  # said once, before any request: later lines may hold what clients have written
        async for line in process.stderr:
            text = line.decode(errors="replace")
            if not ready and (found := _READY.fullmatch(text.strip())):
                ready, self.url = True, found[1]
                if not self._first.done():
                    self._first.set_result(None)
            elif text.strip():
                print(text, end="", file=sys.stderr, flush=True)
        return await process.wait()
