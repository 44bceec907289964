"""`foretell export`: a draft head in another engine's layout, or theirs in ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, stderr


def export(
    head: Annotated[Path, typer.Argument(help="Folder of a draft head, in any layout that loads.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", help="foretell, safeailab, specforge, speculators or medusa.", show_default=True
        ),
    ] = "foretell",
    kind: Annotated[
        str | None, typer.Option("--kind", help="eagle, eagle3, mtp or medusa.  [default: as it says]")
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="Model that it drafts for; as in generate.", show_default=True)
    ] = "smollm2-135m",
    device: opt.DeviceOpt = "auto",
) -> None:
    """Write a draft head in another layout; it is loaded strictly before."""
    from foretell.models.load import load_model
    from foretell.train.convert import convert, kind_of

    known = kind_of(head, kind)
    with model_progress() as report:
        loaded = load_model(target, device=device, report=report)
    convert(known, head, loaded, form, out)
    stderr().print(f"wrote {out}", style="dim")
