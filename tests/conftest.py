"""Tiny random models and helpers that all tests share."""

from __future__ import annotations

import os

# two workers on two cores: one thread each, set before torch is imported
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from tests import zoo


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
