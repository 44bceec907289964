"""Who runs: requests wait in order of arrival and are admitted while the arena has room."""

from __future__ import annotations

from collections import deque

from foretell.cache import KVCache
from foretell.engine.request import Request
from foretell.errors import InputError


class Scheduler:
    """First come, first served; a request is admitted when its whole range can be reserved.

    Args:
        cache: the target's cache.
        max_batch: requests that run at once.
        reuse: whether prefixes of other requests are copied.
    """

    def __init__(self, cache: KVCache, max_batch: int, *, reuse: bool = True) -> None:
        self.running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._cache = cache
        self._max_batch = max_batch
        self._reuse = reuse

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InputError: it could never fit.
        """
        slots = self._cache.arena.slots
        if request.capacity > slots:
            raise InputError(
                f"the request needs {request.capacity} KV slots (prompt {request.prompt_length}, max_tokens "
                f"{request.params.max_tokens}, room for a draft), the cache has {slots}",
                hint="raise kv_tokens, or lower max_tokens",
            )
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Moves waiting requests to running while there is room; returns those moved."""
        moved: list[Request] = []
        while self._waiting and len(self.running) < self._max_batch:
            request = self._waiting[0]
            request.lease = self._cache.reserve(request.tokens, request.capacity, reuse=self._reuse)
            if request.lease is None:
                break
            request.stats.reused = request.lease.length
            self.running.append(self._waiting.popleft())
            moved.append(request)
        return moved

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its slots back."""
        if request.lease is None:
            self._waiting.remove(request)
            return
        self.running.remove(request)
        self._cache.release(request.lease)
        request.lease = None
