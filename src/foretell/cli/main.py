"""The command line. Verbs import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import os
import sys

import typer

from foretell.cli import (
    bench,
    chat,
    demo,
    drafters,
    export,
    generate,
    inspect,
    plan,
    profile,
    pull,
    serve,
    train,
)

app = typer.Typer(
    name="foretell",
    help="Large language models that answer faster without changing what they say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(pull.pull)
app.command()(inspect.inspect)
app.command()(drafters.drafters)
app.add_typer(plan.app)
app.command()(profile.profile)
app.add_typer(train.app)
app.command()(export.export)
app.add_typer(bench.app)


def main() -> None:
    """Entry point: user errors are an error line and a hint on stderr, and exit code 2."""
    import logging

    from foretell.errors import InputError, RankError

    # torchrun starts this on every rank; rank 0 speaks
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.CRITICAL
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except InputError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(2)
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
