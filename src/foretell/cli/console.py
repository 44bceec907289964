"""Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from foretell.models.catalog import Report


def stderr() -> Console:
    """A console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def stdout() -> Console:
    """A console on stdout, for tables."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width; do not cut what it carries
    return console


def print_json(value: Any) -> None:
    """One JSON document on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def progress_bar(*, count: bool = True) -> Progress:
    """A bar on stderr that disappears when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn())
    ending = (
        (MofNCompleteColumn(), TimeRemainingColumn()) if count else (TextColumn("{task.percentage:>3.0f} %"),)
    )
    return Progress(*columns, *ending, console=stderr(), transient=True)


@contextmanager
def named_progress() -> Iterator[Report]:
    """A `Report` that draws a bar on stderr for everything that it is told of."""
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def model_progress() -> Iterator[Report]:
    """A `Report` that draws bars on stderr once something is reported."""
    bar = progress_bar(count=False)
    tasks: dict[str, Any] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()
