"""`foretell drafters`: what can draft, with which options, and how drafts are judged."""

from __future__ import annotations

from typing import Any

from foretell.cli import options as opt
from foretell.cli.console import print_json, stdout


def drafters(as_json: opt.JsonOpt = False) -> None:
    """List the drafters with their options (--drafter-opt KEY=VALUE), and the acceptance rules."""
    from foretell.verify import RULES

    listed = describe()
    rules = [{"name": r.name, "lossless": r.lossless, "about": r.about} for _, r in RULES.items()]
    if as_json:
        print_json({"drafters": listed, "rules": rules})
        return
    from rich.table import Table

    table = Table(
        title="--drafter NAME[:ARGUMENT], joined by + where the first knows what its drafts are worth"
    )
    for name in ("drafter", "option", "default", "what it does"):
        table.add_column(name)
    for entry in listed:
        table.add_row(entry["usage"], "", "", entry["about"], end_section=not entry["options"])
        for option in entry["options"]:
            last = option is entry["options"][-1]
            default = str(option["default"]).lower() if option["type"] == "bool" else str(option["default"])
            table.add_row("", option["name"], default, option["about"], end_section=last)
    stdout().print(table)
    table = Table(title="--verify RULE")
    for name in ("rule", "lossless", "what it does"):
        table.add_column(name)
    for rule in rules:
        table.add_row(str(rule["name"]), "yes" if rule["lossless"] else "NO", str(rule["about"]))
    stdout().print(table)


def describe() -> list[dict[str, Any]]:
    """Every drafter as a JSON object."""
    from foretell.drafters import all_drafters, options_of

    out = []
    for name, entry in all_drafters().items():
        options = [
            {"name": o.name, "type": o.kind.__name__, "default": o.default, "about": o.about}
            for o in options_of(entry)
        ]
        usage = name
        if entry.argument is not None:
            optional = entry.argument.startswith("[")
            usage = f"{name}[:{entry.argument[1:-1]}]" if optional else f"{name}:{entry.argument}"
        out.append({"name": name, "usage": usage, "about": entry.about, "options": options})
    return out
