"""`foretell serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO


def start(model, log: IO[str], *options: str) -> subprocess.Popen[bytes]:
    """On a free port, with all output in `log`."""
    command = [sys.executable, "-m", "foretell", "serve", "-m", str(model), "--port", "0", *options]
    return subprocess.Popen(command, stderr=log, stdout=log)


def url_of(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Where it listens, as soon as it is ready."""
    for _ in range(2400):
        if found := re.search(r"(http://\S+)/v1 is ready", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")
