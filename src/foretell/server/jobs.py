"""What a client waits for: one HTTP request, which may be several of the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from foretell.engine import Request, TokenLogprob
from foretell.types import FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain of one answer.

    Args:
        index: which of the job's answers.
        origins, places: for each token, see `Chunk`.
        logprobs: per token, where they were asked for.
        seconds: since the job came.
        finish_reason: set in the last piece.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    places: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    seconds: float
    finish_reason: FinishReason | None = None


class JobFailed(Exception):
    """The engine gave a job up: the message says why, `status` is HTTP's."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False, slots=True)
class Job:
    """A client's answers on their way. The worker's thread fills `requests`; everything else belongs to the
    event loop.

    Attributes:
        answers: how many there are.
        came: when, by `time.perf_counter`.
        unfinished: those that still run or wait.
        first_s, last_s: per answer, seconds until its first and its latest token.
    """

    answers: int
    came: float = field(default_factory=time.perf_counter)
    requests: list[Request] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    unfinished: int = field(init=False)
    closed: bool = False
    _news: asyncio.Queue[Piece | JobFailed] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.unfinished = self.answers

    def tell(self, news: Piece | JobFailed) -> None:
        """Hands on what came from the worker."""
        if not self.closed:
            self._news.put_nowait(news)

    async def pieces(self, deadline: float) -> AsyncIterator[Piece]:
        """Until all answers have ended.

        Args:
            deadline: by the event loop's clock.

        Raises:
            JobFailed: the engine gave it up.
            TimeoutError: the deadline has passed.
        """
        left = self.answers
        while left:
            async with asyncio.timeout_at(deadline):
                news = await self._news.get()
            if isinstance(news, JobFailed):
                raise news
            yield news
            left -= news.finish_reason is not None
