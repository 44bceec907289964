"""From what a user writes to a drafter: NAME[:ARGUMENT], several joined by +, and their options.

Drafters from outside are entry points of the group `foretell.drafters`, each a `DrafterEntry`.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from foretell.drafters.base import Drafter, DrafterContext, DrafterEntry, ScoredDrafter
from foretell.drafters.builtin import DRAFTERS
from foretell.drafters.combine import CombinedDrafter
from foretell.errors import InputError

GROUP = "foretell.drafters"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Part:
    """One drafter of a specification, checked but not built. `options` is the entry's dataclass."""

    name: str
    entry: DrafterEntry
    argument: str | None
    options: Any


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a drafter, for listings. `about` is what its docstring says."""

    name: str
    kind: type
    default: Any
    about: str


@cache
def outside() -> Mapping[str, DrafterEntry]:
    """Drafters of other packages.

    Raises:
        InputError: one cannot be loaded, is no `DrafterEntry`, or takes a name that is taken.
    """
    found: dict[str, DrafterEntry] = {}
    for point in entry_points(group=GROUP):
        try:
            entry = point.load()
        except Exception as error:  # whatever the other package raises
            raise InputError(f"drafter {point.name!r} ({point.value}) cannot be loaded: {error}") from error
        if not isinstance(entry, DrafterEntry):
            raise InputError(f"drafter {point.name!r} ({point.value}) is no DrafterEntry")
        if point.name in DRAFTERS or point.name in found:
            raise InputError(f"two drafters are called {point.name!r}; one of them is {point.value}")
        found[point.name] = entry
    return found


def all_drafters() -> dict[str, DrafterEntry]:
    """Built-in drafters, then those of other packages."""
    return {**dict(DRAFTERS.items()), **outside()}


def options_of(entry: DrafterEntry) -> list[Option]:
    """The options of a drafter, in order."""
    kinds = typing.get_type_hints(entry.options)
    about = _described(entry.options.__doc__ or "")
    listed = []
    for item in fields(entry.options):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        listed.append(Option(item.name, kinds[item.name], default, about.get(item.name, "")))
    return listed


def parse(spec: str, options: Mapping[str, Any]) -> list[Part]:
    """The drafters of a specification.

    Args:
        spec: NAME or NAME:ARGUMENT, or several joined by +.
        options: by name; with several drafters NAME.OPTION where the name alone is not clear. Text is
            converted to the option's type.

    Raises:
        InputError: unknown name or option, a missing or surplus argument, a bad value.
    """
    pieces = _split(spec)
    names = [name for name, _ in pieces]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"drafter {twice[0]!r} is given twice in {spec!r}")
    if bad := [key for key in options if not isinstance(key, str)]:
        raise InputError(f"drafter options are named by text, got {bad[0]!r}")
    entries = [_find(name) for name, _ in pieces]
    own: list[dict[str, Any]] = [{} for _ in pieces]
    for key, value in options.items():
        index, name = _owner(key, names, entries)
        own[index][name] = value
    parts = []
    for (name, argument), entry, given in zip(pieces, entries, own, strict=True):
        _check_argument(name, entry, argument)
        known = {option.name: option for option in options_of(entry)}
        values = {key: _convert(name, known[key], value) for key, value in given.items()}
        parts.append(Part(name, entry, argument or None, entry.options(**values)))
    return parts


def build_drafter(spec: str, options: Mapping[str, Any], context: DrafterContext) -> Drafter:
    """The drafter of a specification; see `parse`.

    Raises:
        InputError: see `parse`; or an argument cannot be loaded or does not fit the target; or a
            drafter that cannot say what its drafts are worth stands before another.
    """
    parts = parse(spec, options)
    drafter = parts[-1].entry.build(context, parts[-1].argument, parts[-1].options)
    for part in reversed(parts[:-1]):
        first = part.entry.build(context, part.argument, part.options)
        if not isinstance(first, ScoredDrafter):
            raise InputError(
                f"drafter {part.name!r} cannot stand before another: its drafts have no scores",
                hint=f"suffix+{part.name}",
            )
        drafter = CombinedDrafter(first, drafter)
    return drafter


def parse_entries(entries: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE entries of a command line.

    Raises:
        InputError: an entry has another form, or a key comes twice.
    """
    out: dict[str, str] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise InputError(f"drafter_opt must look like KEY=VALUE, got {entry!r}")
        if key in out:
            raise InputError(f"drafter_opt {key} is given twice")
        out[key] = value
    return out


def _split(spec: str) -> list[tuple[str, str | None]]:
    """(name, argument) per drafter. A + joins two drafters where a known name follows it: paths may
    hold one too."""
    names = "|".join(map(re.escape, DRAFTERS))
    pieces = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", spec)
    if any("+" in piece.partition(":")[0] for piece in pieces) and outside():
        names = "|".join(map(re.escape, all_drafters()))
        pieces = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", spec)
    parted = [piece.partition(":") for piece in pieces]
    return [(name, argument if colon else None) for name, colon, argument in parted]


def _find(name: str) -> DrafterEntry:
    if name in DRAFTERS:
        return DRAFTERS[name]
    others = outside()
    if name not in others:
        raise InputError(f"unknown drafter {name!r}", hint=f"one of: {', '.join([*DRAFTERS, *others])}")
    return others[name]


def _check_argument(name: str, entry: DrafterEntry, argument: str | None) -> None:
    if entry.argument is None and argument is not None:
        raise InputError(f"drafter {name!r} takes no argument, got {argument!r}")
    optional = entry.argument is not None and entry.argument.startswith("[")
    if entry.argument is not None and not optional and not argument:
        raise InputError(f"drafter {name!r} needs an argument", hint=f"{name}:{entry.argument}")


def _owner(key: str, names: Sequence[str], entries: Sequence[DrafterEntry]) -> tuple[int, str]:
    """Which of the drafters an option belongs to, and its name there."""
    prefix, dot, name = key.rpartition(".")
    holders = [
        index
        for index, entry in enumerate(entries)
        if any(item.name == name for item in fields(entry.options)) and (not dot or names[index] == prefix)
    ]
    if not holders:
        known = {
            n: ", ".join(f.name for f in fields(e.options)) or "none"
            for n, e in zip(names, entries, strict=True)
        }
        listed = "; ".join(f"{n}: {options}" for n, options in known.items())
        raise InputError(f"drafter {'+'.join(names)!r} has no option {key!r}", hint=f"options of {listed}")
    if len(holders) > 1:
        clear = " or ".join(f"{names[index]}.{name}" for index in holders)
        raise InputError(
            f"drafter option {key!r} belongs to several of {'+'.join(names)}", hint=f"say {clear}"
        )
    return holders[0], name


def _convert(drafter: str, option: Option, value: Any) -> Any:
    """A value of the option's type."""
    kind = option.kind
    try:
        if isinstance(value, str) and kind is bool:
            return _TRUTH[value.lower()]
        if isinstance(value, str) and kind in (int, float):
            value = kind(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
    except (ValueError, KeyError):
        want = "true or false" if kind is bool else {int: "an integer", float: "a number"}.get(kind, "text")
        raise InputError(f"{drafter} option {option.name} must be {want}, got {value!r}") from None
    return value


def _described(docstring: str) -> dict[str, str]:
    """What the Args section of a docstring says of each name ("a, b: text" describes both)."""
    _, _, section = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if match := re.match(r" {8}(\w+(?:, \w+)*): (.+)", line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2].strip())
        elif names and line.startswith(" " * 12):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def origins_of(parts: Sequence[Part], drafter: Drafter) -> tuple[str, ...]:
    """Names of the origins of drafts (`DraftTree.origin`): the drafters; for `auto`, what it is made of."""
    if [part.name for part in parts] == ["auto"]:
        return ("suffix", "heads") if isinstance(drafter, CombinedDrafter) else ("suffix",)
    return tuple(part.name for part in parts) or (type(drafter).__name__,)
