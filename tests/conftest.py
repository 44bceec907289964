"""Tiny random models and helpers that all tests share."""

from __future__ import annotations

import os

# two workers on two cores: one thread each, set before torch is imported
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import io
import sys
from pathlib import Path

import pytest
import torch

from tests import gguf_files, zoo


@pytest.fixture
def foretell(monkeypatch, capsys):
    """foretell ARGS -> (exit code, stdout, stderr), in this process."""
    from foretell.cli.main import main

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["foretell", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A tiny model in a file, and a home of its own for what is made of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        path = tmp_path_factory.mktemp("served") / "tiny.gguf"
        gguf_files.write(path)
        yield path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """(architecture, **overrides) -> folder of a tiny random checkpoint, made once a session."""
    root = tmp_path_factory.mktemp("zoo")
    made: dict[str, Path] = {}

    def make(name: str, **overrides: object) -> Path:
        key = f"{name}-{sorted(overrides.items())!r}"
        if key not in made:
            made[key] = zoo.save_random(name, root / str(len(made)), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def decoder(model_folder):
    """(architecture, **overrides) -> the own decoder of a tiny random checkpoint."""
    from foretell.models.decoder import load_decoder

    made: dict[str, object] = {}

    def make(name: str = "llama", **overrides: object):
        key = f"{name}-{sorted(overrides.items())!r}"
        if key not in made:
            made[key] = load_decoder(model_folder(name, **overrides), torch.float32, torch.device("cpu"))
        return made[key]

    return make
