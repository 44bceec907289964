"""Names to things, with an error that lists the names there are."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Generic, TypeVar

from foretell.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """An immutable table of named implementations.

    Args:
        kind: what the entries are, for messages ("drafter").
        entries: by name.
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise InputError(
                f"unknown {self._kind} {name!r}", hint=f"one of: {', '.join(self._entries)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def items(self) -> ItemsView[str, T]:
        """Names and entries, in order of registration."""
        return self._entries.items()
