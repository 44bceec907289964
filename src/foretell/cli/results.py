"""Where measurements go: a folder with JSON, figures and what is needed to repeat them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli.console import stderr

OutOpt = Annotated[Path, typer.Option("--out", help="Folder for PNG and JSON files.", show_default=True)]
OUT = Path("results")


def result_folder(out: Path) -> Path:
    """The folder for results, made before anything is measured."""
    from foretell.errors import InputError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror}", hint="choose another folder with --out"
        ) from error
    return out


def save(out: Path, name: str, facts: dict[str, Any], results: Any) -> None:
    """Writes OUT/NAME.json with provenance."""
    from foretell.bench.provenance import provenance

    value = {"provenance": provenance(), **facts, "results": results}
    path = out / f"{name}.json"
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    stderr().print(f"wrote {path}", style="dim")
