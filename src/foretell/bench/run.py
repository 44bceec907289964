"""Methods side by side on tasks: who is how fast, with which answers. Goes on where it was interrupted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.items import Item
from foretell.bench.methods import PLAIN, Answer, Method, Unavailable
from foretell.errors import InputError
from foretell.stats import StepStats
from foretell.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch answered once by one method."""

    method: str
    batch: int
    temperature: float
    group: int
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.method}|{self.batch}|{self.temperature}|{self.group}|{self.repeat}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int
    seed: int = 1234


class Log:
    """Finished cells, one JSON line each, so that nothing measured is lost.

    Raises:
        InputError: the file is of another measurement.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path = path
        self.cells: dict[str, dict[str, Any]] = {}
        wanted = json.loads(json.dumps(facts))
        if path.exists():
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            known = _parse(lines[0]) if lines else None
            if known != wanted:
                raise InputError(
                    f"{path} holds another measurement", hint="choose another folder with --out, or remove it"
                )
            for line in lines[1:]:
                if (cell := _parse(line)) is not None:  # the last line of an interrupted run may be cut
                    self.cells[cell["key"]] = cell
            if not text.endswith("\n"):  # what follows is no part of the cut line
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")
        else:
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")

    def add(
        self, cell: Cell, method: Method, seconds: float, items: Sequence[Item], answers: Sequence[Answer]
    ) -> None:
        """Appends a finished cell."""
        value = {
            "key": cell.key,
            "method": cell.method,
            "reference": method.reference,
            "batch": cell.batch,
            "temperature": cell.temperature,
            "task": items[0].task,
            "repeat": cell.repeat,
            "seconds": seconds,
            "answers": [
                {
                    "item": item.id,
                    "ids": answer.token_ids,
                    "count": answer.count,
                    "first": answer.first,
                    "first_s": answer.first_s,
                    "gaps_s": [round(gap, 6) for gap in answer.gaps_s],
                    "stats": None if answer.stats is None else answer.stats.counters(),
                }
                for item, answer in zip(items, answers, strict=True)
            ],
        }
        self.append(value)

    def append(self, value: dict[str, Any]) -> None:
        """Adds a line; its `key` tells what it is."""
        self.cells[value["key"]] = value
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def groups(items: Sequence[Item], batch: int) -> list[list[Item]]:
    """Batches of one task each; the last of a task may be smaller."""
    out = []
    for task in dict.fromkeys(item.task for item in items):
        own = [item for item in items if item.task == task]
        out += [own[start : start + batch] for start in range(0, len(own), batch)]
    return out


def cells(
    methods: Sequence[Method], items: Sequence[Item], settings: Settings
) -> Iterator[tuple[Cell, list[Item]]]:
    """Every cell in the order of measuring: methods in turn, so that a drift of the machine hits all."""
    for batch in settings.batches:
        for temperature in settings.temperatures:
            able = [m.name for m in methods if (batch == 1 or m.batches) and (m.samples or not temperature)]
            for repeat in range(settings.repeats):
                for number, group in enumerate(groups(items, batch)):
                    shift = (number + repeat) % len(able)
                    for name in able[shift:] + able[:shift]:
                        yield Cell(name, batch, temperature, number, repeat), group


def measure(
    methods: Sequence[Method],
    items: Sequence[Item],
    settings: Settings,
    log: Log,
    clock: Callable[[], float],
    on_cell: Callable[[], None],
) -> dict[str, str]:
    """Measures what the log does not hold yet. Each method warms up on a few tokens first.

    Returns:
        method -> reason, of those that turned out not to work here.
    """
    by_name = {method.name: method for method in methods}
    lost: dict[str, str] = {}
    sessions: dict[str, tuple[int, float, int]] = {}
    for cell, group in cells(methods, items, settings):
        if cell.key not in log.cells and cell.method not in lost:
            method = by_name[cell.method]
            params = SamplingParams(
                temperature=cell.temperature, seed=settings.seed if cell.temperature else None
            )
            session = cell.batch, cell.temperature, cell.repeat
            try:
                if cell.method not in sessions:
                    short = Item(items[0].id, items[0].task, items[0].ids, min(8, items[0].max_tokens))
                    method.answer([short], params)
                if sessions.get(cell.method) != session:
                    method.begin()  # a repetition must not find the answers of the one before
                    sessions[cell.method] = session
                start = clock()
                answers = method.answer(group, params)
                log.add(cell, method, clock() - start, group, answers)
            except Unavailable as reason:
                lost[cell.method] = str(reason)
        on_cell()
    return lost


def summarise(log: Log) -> list[dict[str, Any]]:
    """One object per batch size, temperature, task and method, and one over all tasks.

    Ratios are to plain decoding with the same weights; another engine's, to our first plain method.
    """
    found = list(log.cells.values())
    out = []
    for batch, temperature in dict.fromkeys((c["batch"], c["temperature"]) for c in found):
        here = [c for c in found if (c["batch"], c["temperature"]) == (batch, temperature)]
        tasks = list(dict.fromkeys(c["task"] for c in here))
        for task in [*tasks, "overall"] if len(tasks) > 1 else tasks:
            part = [c for c in here if task in (c["task"], "overall")]
            first = next((c["method"] for c in part if _plain(c["method"])), PLAIN)
            for method in dict.fromkeys(c["method"] for c in part):
                own = [c for c in part if c["method"] == method]
                head = {"method": method, "task": task, "batch": batch, "temperature": temperature}
                reference = [c for c in part if c["method"] == own[0]["reference"]]
                base = own[0]["reference"] if _plain(own[0]["reference"]) else first
                plain = [c for c in part if c["method"] == base]
                out.append({**head, **_row(own, plain, reference)})
    return out


def _plain(name: str) -> bool:
    """Whether that is our plain method, on some weights."""
    return name.partition(" ")[0] == PLAIN


def _row(
    own: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    speed, low, high = _speed(own)
    base = _speed(plain)[0] if plain else None
    answers = [a for c in own for a in c["answers"]]
    stats = _total(answers)
    wanted = {a["item"]: a["ids"] for c in reference for a in c["answers"]}
    same = [a["ids"] == wanted[a["item"]] for a in answers if a["item"] in wanted]
    gaps = sorted(gap for a in answers for gap in a["gaps_s"])
    ratio = None if base is None else speed / base
    decoding, decoding_plain = _decoding(own), _decoding(plain)
    per_step = stats.emitted / stats.steps if stats else None
    return {
        "tokens_per_s": round(speed, 3),
        "spread": [round(low, 3), round(high, 3)],
        "ratio_to_plain": None if ratio is None else round(ratio, 4),
        "decode_tokens_per_s": None if decoding is None else round(decoding, 3),
        "decode_ratio": round(decoding / decoding_plain, 4) if decoding and decoding_plain else None,
        "al": round(stats.al, 4) if stats else None,
        "tokens_per_step": None if per_step is None else round(per_step, 4),
        "overhead_c": round(per_step / ratio - 1, 4) if per_step and ratio else None,
        "lossless": all(same) if same else None,
        "identical": [sum(same), len(same)],
        "ttft_s": round(statistics.median(a["first_s"] for a in answers), 4),
        "itl_ms": round(1000 * statistics.median(gaps), 3) if gaps else None,
        "itl_p99_ms": round(1000 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 3) if gaps else None,
        "marginal_acceptance": [round(x, 4) for x in stats.marginal] if stats else [],
        "seconds": stats.to_json()["seconds"] if stats else {},
        "answers": len(answers),
    }


def _decoding(own: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per second behind what came first of each answer: without the reading of prompts. In a batch,
    time counts from the last first token."""
    by_group: dict[str, list[tuple[int, float]]] = {}
    for cell in own:
        tokens = sum(a["count"] - a["first"] for a in cell["answers"])
        seconds = cell["seconds"] - max(a["first_s"] for a in cell["answers"])
        by_group.setdefault(cell["key"].rpartition("|")[0], []).append((tokens, seconds))
    tokens = sum(same[0][0] for same in by_group.values())
    seconds = sum(statistics.median(s for _, s in same) for same in by_group.values())
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _speed(own: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Tokens per second from the medians of the repeats, and over the fastest and slowest of them."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for cell in own:
        by_group.setdefault(cell["key"].rpartition("|")[0], []).append(cell)
    tokens = sum(sum(a["count"] for a in same[0]["answers"]) for same in by_group.values())
    times = [[c["seconds"] for c in same] for same in by_group.values()]
    middle = sum(statistics.median(t) for t in times)
    return tokens / middle, tokens / sum(map(max, times)), tokens / sum(map(min, times))


def _total(answers: Sequence[Mapping[str, Any]]) -> StepStats | None:
    """What speculation did over all answers; None where the method does not tell."""
    parts = [StepStats(**answer["stats"]) for answer in answers if answer["stats"] is not None]
    total = StepStats()
    for part in parts:
        total.add(part)
    return total if parts else None
