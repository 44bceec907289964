"""Many streams at once from a server, against one after the other offline: how fast, how soon, and with which
texts. Groups of prompts go through all contenders in turn, so that a drift of the machine hits all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Protocol

from foretell.api import LLM
from foretell.bench.items import Item
from foretell.bench.methods import Unavailable
from foretell.types import SamplingParams

PLAIN = "plain, one by one"
_READY = re.compile(r"http://([^:/]+):(\d+)/v1 is ready")
_START_S = 120.0
_SHARES = (0.25, 1.0, 0.5, 0.75)  # of the longest answer, in turn: streams of mixed lengths


@dataclass(frozen=True, slots=True)
class Served:
    """An answer: whether it ended before its limit; seconds until its first token and its last one, from when
    the whole group was asked."""

    text: str
    tokens: int
    ended: bool
    first_s: float
    last_s: float


class Contender(Protocol):
    """Who answers groups of prompts.

    Attributes:
        name: in tables.
        exact: whether its texts are to equal offline's.
    """

    name: str
    exact: bool

    def answer(self, items: Sequence[Item]) -> list[Served]:
        """Answers a group, greedily."""
        ...


class Sequential:
    """Plain decoding offline, one prompt after the other; its texts are the truth."""

    name, exact = PLAIN, True

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, items: Sequence[Item]) -> list[Served]:
        """See `Contender`."""
        start, found = time.perf_counter(), []
        self._llm.engine.cache.forget()
        for item in items:
            stream = self._llm.stream(item.ids, SamplingParams(max_tokens=item.max_tokens))
            next(stream)
            first = time.perf_counter() - start
            for _ in stream:
                pass
            answer = stream.completion
            last = time.perf_counter() - start
            ended = answer.finish_reason == "stop"
            found.append(Served(answer.text, len(answer.token_ids), ended, first, last))
        return found


class Streams:
    """A server at an address: all prompts of a group at once, each a stream of its own."""

    def __init__(self, name: str, address: tuple[str, int], model: str, extra: dict[str, Any]) -> None:
        self.name = name
        self.exact = not extra
        self._address, self._model, self._extra = address, model, extra

    def answer(self, items: Sequence[Item]) -> list[Served]:
        """See `Contender`."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(lambda item: self._stream(item, start), items))

    def _stream(self, item: Item, start: float) -> Served:
        body = {
            "model": self._model,
            "prompt": list(item.ids),
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        parts: list[str] = []
        first = last = 0.0
        tokens, ended = 0, False
        for event in _events(self._address, body):
            if "error" in event:
                raise RuntimeError(f"{self.name}: {event['error']}")
            text = "".join(choice["text"] for choice in event["choices"])
            if text:
                last = time.perf_counter() - start
                first = first or last
                parts.append(text)
            ended |= any(choice.get("finish_reason") == "stop" for choice in event["choices"])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return Served("".join(parts), tokens, ended, first, last)


def _events(address: tuple[str, int], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = HTTPConnection(*address)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        connection.close()


@contextmanager
def process(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server in a process of its own; its address, once it says that it is ready.

    Raises:
        Unavailable: it ends, or does not get ready.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stop = threading.Timer(_START_S, child.kill)
    try:
        stop.start()
        address = _address(child)
        stop.cancel()  # it has started; how long it is asked is nobody's limit
        yield address
    finally:
        stop.cancel()
        child.terminate()
        child.wait()


def _address(child: subprocess.Popen[str]) -> tuple[str, int]:
    assert child.stdout is not None
    said: list[str] = []
    for line in child.stdout:
        said.append(line.strip())
        if found := _READY.search(line):
            # what it goes on to say must not fill the pipe
            threading.Thread(target=child.stdout.read, daemon=True).start()
            return found[1], int(found[2])
    told = [line for line in said if line and not line.startswith("hint:")]
    raise Unavailable(told[-1] if told else "it ended at once")


def mixed(items: Sequence[Item]) -> list[Item]:
    """The same prompts with answers of mixed lengths."""
    return [
        Item(item.id, item.task, item.ids, max(1, round(item.max_tokens * _SHARES[n % len(_SHARES)])))
        for n, item in enumerate(items)
    ]


def measure(
    contenders: Sequence[Contender], items: Sequence[Item], streams: int, on_cell: Callable[[], None]
) -> dict[str, list[list[Served]]]:
    """Groups of `streams` prompts through all contenders in turn; a few tokens first, not counted."""
    warm = Item("warm", "warm", items[0].ids[:8], 4)
    for contender in contenders:
        contender.answer([warm])
    found: dict[str, list[list[Served]]] = {contender.name: [] for contender in contenders}
    for number, at in enumerate(range(0, len(items), streams)):
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            found[contender.name].append(contender.answer(items[at : at + streams]))
            on_cell()
    return found


def summarise(contenders: Sequence[Contender], found: dict[str, list[list[Served]]]) -> list[dict[str, Any]]:
    """A row per contender."""
    wanted = [each.text for group in found[PLAIN] for each in group]
    base = _speed(found[PLAIN])
    rows = []
    for contender in contenders:
        groups = found[contender.name]
        answers = [each for group in groups for each in group]
        same = sum(each.text == text for each, text in zip(answers, wanted, strict=True))
        first = sorted(each.first_s for each in answers)
        rows.append(
            {
                "method": contender.name,
                "tokens": sum(each.tokens for each in answers),
                "ended": sum(each.ended for each in answers),
                "tokens_per_s": round(_speed(groups), 3),
                "ratio_to_plain": round(_speed(groups) / base, 4),
                "ttft_p50_s": round(first[len(first) // 2], 4),
                "ttft_p95_s": round(first[min(len(first) - 1, int(0.95 * len(first)))], 4),
                "lossless": same == len(answers) if contender.exact else None,
                "identical": [same, len(answers)] if contender.exact else None,
            }
        )
    return rows


def _speed(groups: Sequence[Sequence[Served]]) -> float:
    """Tokens per second of wall-clock time, prompts included; a group ends with its last token."""
    tokens = sum(each.tokens for group in groups for each in group)
    return tokens / sum(max(each.last_s for each in group) for group in groups)


COLUMNS = (
    ("method", "method"),
    ("tokens", "tokens"),
    ("ended", "ended by themselves"),
    ("tokens_per_s", "tokens/s"),
    ("ratio_to_plain", "to plain"),
    ("ttft_p50_s", "TTFT median s"),
    ("ttft_p95_s", "TTFT 95 % s"),
    ("lossless", "texts equal offline's"),
)


def markdown(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The rows as a table, under what is needed to repeat them."""
    from foretell.bench.report import cell

    lines = ["# Serving", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| " + " | ".join(title for _, title in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cell(row[key]) for key, _ in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"
