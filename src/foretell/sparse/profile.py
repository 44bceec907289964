"""Which layers and heads Dustin goes by, found once per pair of target and draft (`foretell profile`).

A profile is a JSON file. Profiles of known pairs come with the package, and are used by themselves where the
models have that shape and name.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from foretell.errors import InputError
from foretell.sparse.lookahead import Heads

_log = logging.getLogger(__name__)
_FORMAT = 1
_FIELDS = ("format", "target", "draft", "target_heads", "draft_heads", "lookahead", "found")
_SHAPE = ("name", "layers", "heads", "hidden")
_FOUND = ("command", "date", "machine", "length", "traces", "arr", "curves")


class Sized(Protocol):
    """As much of a model as a profile is matched by."""

    num_layers: int
    num_heads: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as a profile knows it: what it is called, and sizes that must be the same."""

    name: str
    layers: int
    heads: int
    hidden: int

    def fits(self, other: ModelShape) -> bool:
        """Whether the sizes are the same."""
        return (self.layers, self.heads, self.hidden) == (other.layers, other.heads, other.hidden)

    def called(self, name: str) -> bool:
        """Whether a model of this name, path or hub id goes by this one's name, whatever follows it."""
        given, own = Path(name).name.lower(), self.name.lower()
        return given.startswith(own) and not given[len(own) : len(own) + 1].isalnum()

    def __str__(self) -> str:
        return f"{self.name} ({self.layers} layers, {self.heads} heads, width {self.hidden})"


def shape_of(model: Sized, name: str) -> ModelShape:
    """The shape of a model that is loaded under this name, path or hub id."""
    return ModelShape(
        Path(name).name.removesuffix(".gguf"), model.num_layers, model.num_heads, model.hidden_size
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """What `dustin` goes by.

    Args:
        target, draft: the pair; the same model where it drafts for itself.
        target_heads: whose attention of the last token is asked.
        draft_heads: whose attention of the draft's tokens is asked.
        lookahead: budget -> share of the room that goes by the draft.
        found: how: command, date, machine, length and number of the traces, mean ARR, curves.
    """

    target: ModelShape
    draft: ModelShape
    target_heads: Heads
    draft_heads: tuple[Heads, ...]
    lookahead: Mapping[int, float]
    found: Mapping[str, Any] = field(default_factory=dict)

    def share(self, budget: int) -> float:
        """The look-ahead's share at this budget: that of the nearest one that was searched."""
        return self.lookahead[min(self.lookahead, key=lambda known: abs(math.log(known / budget)))]

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "format": _FORMAT,
            "target": _shape_json(self.target),
            "draft": _shape_json(self.draft),
            "target_heads": _heads_json(self.target_heads),
            "draft_heads": [_heads_json(heads) for heads in self.draft_heads],
            "lookahead": {str(budget): share for budget, share in self.lookahead.items()},
            "found": dict(self.found),
        }

    def write(self, path: Path) -> None:
        """Stores it.

        Raises:
            InputError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write the profile {path}: {error.strerror}") from error


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        InputError: it cannot be read, or a field is missing, unknown or bad; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read the profile {path}: {error.strerror}", hint="make one with foretell profile"
        ) from error
    except ValueError as error:
        raise InputError(f"the profile {path} is no JSON: {error}") from error
    try:
        return _parse(value)
    except InputError as error:
        raise InputError(f"the profile {path}: {error.message}") from error


def shipped() -> Iterator[Profile]:
    """The profiles that come with the package."""
    for path in sorted((Path(__file__).parent / "profiles").glob("*.json")):
        yield read_profile(path)


def choose(given: Profile | None, target: ModelShape, draft: ModelShape | None) -> Profile | None:
    """The profile for a pair of models.

    Args:
        given: the user's; None = a shipped one by shape and name, if there is one.
        draft: the model that looks ahead; None = none does, any draft will do.

    Raises:
        InputError: the given one is of other models.
    """
    pairs = [("target", target)] if draft is None else [("target", target), ("draft", draft)]
    if given is None:
        for profile in shipped():
            own = {"target": profile.target, "draft": profile.draft}
            if all(own[role].fits(model) and own[role].called(model.name) for role, model in pairs):
                _log.info("profile of %s with draft %s", profile.target.name, profile.draft.name)
                return profile
        return None
    own = {"target": given.target, "draft": given.draft}
    for role, model in pairs:
        if not own[role].fits(model):
            raise InputError(
                f"kv_profile is of {role} {own[role]}, the {role} here is {model}",
                hint="make one with foretell profile",
            )
        if not own[role].called(model.name):
            _log.warning("kv_profile was found with %s %s, used with %s", role, own[role].name, model.name)
    return given


def _shape_json(shape: ModelShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in _SHAPE}


def _heads_json(heads: Heads) -> dict[str, Any]:
    return {"layer": heads.layer, "heads": None if heads.heads is None else list(heads.heads)}


def _parse(value: object) -> Profile:
    fields = _fields(value, "profile", _FIELDS)
    if fields["format"] != _FORMAT:
        raise InputError(f"format must be {_FORMAT}, got {fields['format']!r}")
    target, draft = (_shape(fields[role], role) for role in ("target", "draft"))
    if not isinstance(fields["draft_heads"], list) or not fields["draft_heads"]:
        raise InputError(f"draft_heads must be a list of layers, got {fields['draft_heads']!r}")
    draft_heads = [_heads(item, f"draft_heads[{i}]", draft) for i, item in enumerate(fields["draft_heads"])]
    layers = [heads.layer for heads in draft_heads]
    if len(set(layers)) < len(layers):
        raise InputError(f"draft_heads must name each layer once, got {layers}")
    return Profile(
        target,
        draft,
        _heads(fields["target_heads"], "target_heads", target),
        tuple(draft_heads),
        _shares(fields["lookahead"]),
        _fields(fields["found"], "found", _FOUND),
    )


def _fields(value: object, where: str, names: Sequence[str]) -> dict[str, Any]:
    """An object with exactly these fields."""
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object with {', '.join(names)}, got {value!r}")
    for kind, odd in (("lacks", set(names) - set(value)), ("has unknown", set(value) - set(names))):
        if odd:
            raise InputError(f"{where} {kind} {', '.join(sorted(map(str, odd)))}", hint=", ".join(names))
    return value


def _shape(value: object, where: str) -> ModelShape:
    fields = _fields(value, where, _SHAPE)
    if not isinstance(fields["name"], str) or not fields["name"]:
        raise InputError(f"{where}.name must be text, got {fields['name']!r}")
    sizes = [_count(fields[name], f"{where}.{name}", 1) for name in _SHAPE[1:]]
    return ModelShape(fields["name"], *sizes)


def _heads(value: object, where: str, model: ModelShape) -> Heads:
    fields = _fields(value, where, ("layer", "heads"))
    layer = _count(fields["layer"], f"{where}.layer", 0, model.layers - 1)
    chosen = fields["heads"]
    if chosen is None:
        return Heads(layer)
    if not isinstance(chosen, list) or not chosen or len(set(map(str, chosen))) < len(chosen):
        raise InputError(f"{where}.heads must be a list of different heads, or null for all, got {chosen!r}")
    return Heads(layer, tuple(sorted(_count(head, f"{where}.heads", 0, model.heads - 1) for head in chosen)))


def _shares(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or not value:
        raise InputError(f"lookahead must be an object budget -> share, got {value!r}")
    shares = {}
    for budget, share in value.items():
        if not str(budget).isdecimal() or int(budget) < 1:
            raise InputError(f"lookahead: a budget must be a whole number above 0, got {budget!r}")
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not number or not 0 <= share <= 1:
            raise InputError(f"lookahead[{budget}] must be between 0 and 1, got {share!r}")
        shares[int(budget)] = float(share)
    return shares


def _count(value: object, where: str, least: int, most: int | None = None) -> int:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or not least <= value or (most is not None and value > most):  # type: ignore[operator]
        wanted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InputError(f"{where} must be a whole number {wanted}, got {value!r}")
    assert isinstance(value, int)
    return value
