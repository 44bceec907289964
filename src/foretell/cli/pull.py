"""`foretell pull`: fetches and converts models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.console import model_progress


def pull(
    model: Annotated[str, typer.Argument(help="Catalogue name, hub id or .gguf file.")] = "smollm2-135m",
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="Keep the downloaded .gguf file in this folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the catalogue.")] = False,
) -> None:
    """Fetch a model, convert it if needed, and print its folder, or with --gguf its file."""
    from foretell.models.catalog import CATALOGUE, locate, published

    if show:
        for name, entry in CATALOGUE.items():
            print(f"{name:20} {entry.size / 1e6:6.0f} MB  {entry.about}")
        return
    with model_progress() as report:
        found = locate(model, report) if gguf is None else published(model, gguf, report)
    print(found)
