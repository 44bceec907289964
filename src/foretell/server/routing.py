"""Which of several replicas answers: one that has read the prompt's beginning before, else the least busy."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
_BLOCK = 256  # characters of a prompt that are remembered together
_DEEPEST = 64  # blocks of one prompt
_REMEMBERED = 8192  # blocks per replica
_UNFAIR = 4  # requests that a replica may have more than another, for the sake of what it has read


def blocks(body: bytes) -> list[str]:
    """Names of the beginnings of a request's prompt, each one block longer; none where there is no prompt."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    text = json.dumps(asked.get("messages") or asked.get("prompt") or "")
    found, name = [], hashlib.blake2b(digest_size=12)
    for at in range(0, min(len(text), _DEEPEST * _BLOCK), _BLOCK):
        name.update(text[at : at + _BLOCK].encode())
        found.append(name.hexdigest())
    return found


class Router:
    """Remembers which replica has read which beginnings. Replicas go by any name."""

    def __init__(self) -> None:
        self._known: dict[Hashable, OrderedDict[str, None]] = {}

    def rank(self, names: Sequence[str], loads: Mapping[K, int]) -> list[K]:
        """The replicas that can take a prompt, the best one first.

        Args:
            names: see `blocks`.
            loads: requests that each replica has.
        """
        least = min(loads.values(), default=0)

        def worth(replica: K) -> tuple[bool, int, int]:
            load = loads[replica]
            fair = load <= least + _UNFAIR
            return not fair, -self._read(replica, names) if fair else 0, load

        return sorted(loads, key=worth)

    def remember(self, replica: Hashable, names: Sequence[str]) -> None:
        """The replica reads this prompt."""
        known = self._known.setdefault(replica, OrderedDict())
        for name in names:
            known[name] = None
            known.move_to_end(name)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """The replica begins anew, or is gone."""
        self._known.pop(replica, None)

    def _read(self, replica: Hashable, names: Sequence[str]) -> int:
        """Blocks of the prompt that a replica has read. A block is named by everything before it, too."""
        known: Mapping[str, None] = self._known.get(replica, {})
        return next((count for count, name in enumerate(names) if name not in known), len(names))


def total(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`totals` of several servers as one: counts add up, rates weigh by drafts."""
    drafts = sum(part["drafts"] for part in parts)
    found: dict[str, Any] = {}
    for name, value in parts[0].items():
        if isinstance(value, int):
            found[name] = sum(part[name] for part in parts)
        elif isinstance(value, list):
            longest = max(len(part[name]) for part in parts)
            padded = [[*part[name], *[0.0] * (longest - len(part[name]))] for part in parts]
            weights = [part["drafts"] / drafts if drafts else 0.0 for part in parts]
            found[name] = [
                round(sum(w * v for w, v in zip(weights, each, strict=True)), 4)
                for each in zip(*padded, strict=True)
            ]
    found["al"] = round(1 + found["accepted"] / drafts, 4) if drafts else 1.0
    return found
