"""Trained heads that come with the package, by the model that they were trained for."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "shipped"


def shipped_head(model: str, kind: str) -> Path | None:
    """The folder of a head for a model, or None.

    Args:
        model: catalogue name, hub id or folder: its last part, in any case, whatever follows the name.
        kind: name of the drafter.
    """
    given = Path(model).name.lower()
    for folder in sorted(_FOLDER.glob(f"*/{kind}")):
        own = folder.parent.name
        if given.startswith(own) and not given[len(own) : len(own) + 1].isalnum():
            return folder
    return None
