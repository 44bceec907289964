"""What the suffix drafter costs: microseconds per token by length of history, and memory of its pool.

The text is the source of Python's standard library, which every machine has: real, and repetitive the way
code is.
"""

from __future__ import annotations

import random
import resource
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretell.bench.plots import figure
from foretell.drafters.suffix import SuffixDrafter, SuffixOptions
from foretell.models.tokenizer import Tokenizer
from foretell.sampling import Sampler
from foretell.types import SamplingParams, StepPlan

HISTORIES = (1024, 2048, 4096, 8192, 16384, 32768)
_NOTHING = 2.0  # no token is worth so much: histories are read, and nothing is proposed
_STEP = 4  # tokens that a step emits


@dataclass
class _Request:
    """As much of a request as a drafter may see."""

    id: int
    tokens: list[int]
    capacity: int = 1 << 30
    end_ids: frozenset[int] = frozenset()
    lease: None = None
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = Sampler(SamplingParams(), self.tokens, len(self.tokens), 0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per token of history around `history` tokens: `read` alone, and with a draft proposed
    every four tokens (`total`)."""

    history: int
    read: float
    total: float

    def to_json(self) -> dict[str, object]:
        return {
            "history": self.history,
            "read_us_per_token": round(self.read, 2),
            "total_us_per_token": round(self.total, 2),
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """The pool after `requests` finished requests: bytes by its own account, growth of the process."""

    requests: int
    limit: int
    pool: int
    rss_growth: int

    def to_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "limit_bytes": self.limit,
            "pool_bytes": self.pool,
            "rss_growth_bytes": self.rss_growth,
        }


def text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """Tokens of the standard library's modules, in order of their names."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"), special=False)
        if len(tokens) >= count:
            return tokens[:count]
    return tokens


def costs(tokens: Sequence[int], on_step: Callable[[], None]) -> Iterator[Cost]:
    """Reads the text in steps of four tokens, with and without proposing; medians of windows."""
    reading, both = (_walk(tokens, worth, on_step) for worth in (_NOTHING, 0.0))
    for history in HISTORIES:
        yield Cost(history, reading[history], both[history])


def _walk(tokens: Sequence[int], worth: float, on_step: Callable[[], None]) -> dict[int, float]:
    """Microseconds per token over the last 512 tokens before each history length."""
    drafter = SuffixDrafter(SuffixOptions())
    request = _Request(0, list(tokens[:512]))
    drafter.start(request)
    plans = [StepPlan(16, "measured", worth=worth)]
    found: dict[int, float] = {}
    seconds: list[float] = []
    for end in range(512, max(HISTORIES) + 1, _STEP):
        request.tokens.extend(tokens[len(request.tokens) : end])
        start = time.perf_counter()
        drafter.propose([request], plans)
        seconds.append(time.perf_counter() - start)
        if end in HISTORIES:
            found[end] = 1e6 * sum(seconds[-128:]) / (128 * _STEP)
            on_step()
    return found


def memory(
    tokens: Sequence[int], requests: int, limit_mb: float, on_step: Callable[[], None], length: int = 256
) -> Memory:
    """Finishes many requests, each with a piece of the text as its answer."""
    drafter = SuffixDrafter(SuffixOptions(pool_mb=limit_mb))
    pick = random.Random(0)
    assert drafter.pool is not None
    before = _resident()
    for number in range(requests):
        at = pick.randrange(len(tokens) - length - 64)
        request = _Request(number, list(tokens[at : at + 64]))
        drafter.start(request)
        request.tokens.extend(tokens[at + 64 : at + 64 + length])
        drafter.finish(request)
        if drafter.pool.nbytes > limit_mb * 1e6:
            raise AssertionError(f"the pool holds {drafter.pool.nbytes} bytes, its limit is {limit_mb} MB")
        on_step()
    return Memory(requests, int(limit_mb * 1e6), drafter.pool.nbytes, _resident() - before)


def _resident() -> int:
    """Bytes of the process in memory now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plot(found: Sequence[Cost], path: Path) -> None:
    """Cost per token against history."""
    fig, axis = figure("suffix drafter: cost per token")
    histories = [cost.history for cost in found]
    axis.plot(histories, [cost.total for cost in found], marker="o", label="read and propose")
    axis.plot(histories, [cost.read for cost in found], marker="o", linestyle=":", label="read")
    axis.axhline(50, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0)
    axis.set_xlabel("tokens of history")
    axis.set_ylabel("microseconds per token")
    axis.legend(fontsize=8)
    fig.savefig(path)
