"""Drafters: where proposals come from. Adding one is a file and a line in `DRAFTERS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from foretell.drafters import draft_model, ngram, none
from foretell.drafters.base import Drafter, DrafterContext, DrafterEntry, DraftRequest, Observed
from foretell.errors import InputError
from foretell.registry import Registry

__all__ = [
    "DRAFTERS",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "DrafterEntry",
    "Observed",
    "build_drafter",
]

DRAFTERS = Registry(
    "drafter",
    {
        "none": DrafterEntry(none.build, None, none.NoOptions, "plain decoding"),
        "ngram": DrafterEntry(
            ngram.build, None, ngram.NgramOptions, "prompt lookup: repeats what came before"
        ),
        "draft": DrafterEntry(
            draft_model.build,
            "MODEL",
            draft_model.DraftModelOptions,
            "a smaller model of the same vocabulary",
        ),
    },
)


def check_drafter(spec: str, options: Mapping[str, Any]) -> tuple[DrafterEntry, str | None, Any]:
    """The entry, the argument and the options of NAME or NAME:ARGUMENT.

    Raises:
        InputError: unknown name or option, a missing or surplus argument, a bad value.
    """
    name, colon, argument = spec.partition(":")
    entry = DRAFTERS[name]
    if entry.argument is None and colon:
        raise InputError(f"drafter {name!r} takes no argument, got {argument!r}")
    if entry.argument is not None and not argument:
        raise InputError(f"drafter {name!r} needs an argument", hint=f"{name}:{entry.argument}")
    known = {item.name for item in fields(entry.options)}
    if unknown := sorted(set(options) - known):
        listed = ", ".join(sorted(known)) or "none"
        raise InputError(
            f"drafter {name!r} has no option {', '.join(unknown)}", hint=f"its options: {listed}"
        )
    return entry, argument or None, entry.options(**options)


def build_drafter(spec: str, options: Mapping[str, Any], context: DrafterContext) -> Drafter:
    """The drafter of NAME or NAME:ARGUMENT.

    Raises:
        InputError: see `check_drafter`; or the argument cannot be loaded or does not fit the target.
    """
    entry, argument, checked = check_drafter(spec, options)
    return entry.build(context, argument, checked)
