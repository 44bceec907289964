"""Files that are whole or not there, and what a failed write says."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foretell.errors import InputError


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place once it is whole; a killed run leaves the old
    one."""
    half = path.with_name(path.name + ".part")
    try:
        yield half
        with half.open("rb+") as file:
            os.fsync(file.fileno())
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def disk_error(error: OSError, path: Path, kept: str) -> InputError:
    """What a failed write says."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(
            f"the disk is full: {path} was not written", hint=f"{kept}; free space and run again"
        )
    return InputError(f"{path} cannot be written: {error.strerror or error}", hint=kept)
