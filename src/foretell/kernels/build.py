"""Compiles the C kernels for this machine, once, into the cache folder.

The sources are plain C without any header of torch or Python, so a build takes about a second and
the result serves every version of both. Compilers tried, in order: `$CC`, `cc`, `gcc`, `clang`, and
`python -m ziglang cc`, which `pip install foretell[compiler]` brings where a machine has none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from foretell.paths import cache_dir

# -ffp-contract=off: the compiler must not choose where to fuse multiply and add (native/common.h).
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
SOURCES = Path(__file__).parent / "native"


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why."""


def find_compiler() -> list[str] | None:
    """The command line of the first C compiler that exists, or None."""
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def _cpu_identity() -> str:
    """What -march=native depends on: a library built for another processor must not be loaded."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def library() -> Path:
    """The compiled kernels, built now if the cache has none for these sources and this machine.

    Raises:
        BuildError: no compiler, or it failed.
        InputError: the cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C compiler (install gcc or clang, or `pip install foretell[compiler]`)")
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256()
    for part in (*FLAGS, *compiler, platform.machine(), _cpu_identity()):
        digest.update(part.encode())
    for source in sources:
        digest.update(source.read_bytes())
    target = cache_dir("kernels") / f"cpu-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, [s for s in sources if s.suffix == ".c"], target)
    return target


def _compile(compiler: list[str], sources: list[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [*compiler, *FLAGS, "-march=native", *map(str, sources), "-o", str(built), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{shlex.join(command)}: {error}") from error
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        built.rename(target)  # atomic: another process sees the whole file or none
