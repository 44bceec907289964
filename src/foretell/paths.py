"""Where foretell keeps what it can make again: models, compiled kernels, measurements."""

from __future__ import annotations

import os
from pathlib import Path

from foretell.errors import InputError


def cache_dir(*parts: str) -> Path:
    """A folder below `$FORETELL_HOME`, `$XDG_CACHE_HOME/foretell` or `~/.cache/foretell`, created.

    Raises:
        InputError: the folder cannot be created or written to.
    """
    home = os.environ.get("FORETELL_HOME")
    xdg = os.environ.get("XDG_CACHE_HOME")
    root = Path(home) if home else (Path(xdg) if xdg else Path.home() / ".cache") / "foretell"
    path = root.joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the cache folder {path}: {error.strerror}",
            hint="set FORETELL_HOME to a folder that you may write to",
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(
            f"the cache folder {path} is not writable",
            hint="set FORETELL_HOME to a folder that you may write to",
        )
    return path
