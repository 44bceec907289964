"""The rules that keep the code readable: sizes, import arrows, no names of drafters in the engine, and
documents that say what is there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "foretell"
FILES = sorted(PACKAGE.rglob("*.py"))

# who may import whom, by folder or top-level file of the package; everybody may import what is here
SHARED = {"errors", "paths", "registry", "types", "stats", "noise"}
MAY_IMPORT = {
    **{name: {"errors"} for name in ("errors", "paths", "registry", "noise")},
    "types": {"errors"},
    "stats": {"types"},
    "kernels": SHARED,
    "sampling": SHARED | {"kernels"},
    "cache": SHARED,
    "attention": SHARED | {"kernels", "cache"},
    "models": SHARED | {"kernels", "cache", "attention"},
    "sparse": SHARED | {"kernels", "cache", "attention"},
    "verify": SHARED,
    "json_schema": {"errors"},
    "grammar": SHARED | {"models", "json_schema"},
    "planner": SHARED | {"cache", "attention", "models"},
    "parallel": SHARED | {"kernels", "cache", "attention", "models", "planner"},
    "heads": SHARED | {"kernels", "cache", "attention", "models"},
    "drafters": SHARED | {"sampling", "kernels", "cache", "attention", "models", "heads", "sparse"},
    "engine": SHARED
    | {"sampling", "cache", "attention", "models", "drafters", "verify", "planner", "sparse"},
    "reading": SHARED | {"engine", "models", "drafters", "verify", "sparse"},
    "api": SHARED
    | {"parallel", "engine", "models", "drafters", "verify", "planner", "sparse", "reading", "grammar"},
    "bench": SHARED
    | {
        "api",
        "engine",
        "planner",
        "models",
        "attention",
        "drafters",
        "sampling",
        "sparse",
        "cache",
        "kernels",
        "verify",
        "parallel",
    },
    "profiling": SHARED | {"kernels", "cache", "attention", "models", "sparse", "bench"},
    "train": SHARED | {"attention", "models", "heads", "api", "bench"},
    "server": SHARED | {"api", "engine", "models", "planner"},
    "cli": SHARED
    | {
        "train",
        "parallel",
        "api",
        "engine",
        "models",
        "heads",
        "drafters",
        "verify",
        "planner",
        "bench",
        "profiling",
        "server",
    },
}


def folder_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name and name.startswith("foretell.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "a file holds at most 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines, at most 60"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "bare except"
        assert not isinstance(node, ast.Global), "no global state"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.[ch]")), ids=lambda p: p.name)
def test_sizes_of_c_files(path):
    assert path.read_text().count("\n") <= 400


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_arrows(path):
    folder = folder_of(path)
    if folder in ("__init__", "__main__"):
        return
    beyond = imports(path) - MAY_IMPORT[folder] - {folder}
    assert not beyond, f"{folder} must not import {', '.join(sorted(beyond))}"


def test_the_engine_never_names_a_drafter():
    from foretell.drafters import DRAFTERS

    names = {name for name in DRAFTERS if name not in ("none", "draft", "self")}  # English words
    names |= {"NgramDrafter", "DraftModelDrafter", "NoDrafter", "medusa", "eagle", "lookahead"}
    for path in (PACKAGE / "engine").glob("*.py"):
        code = ast.dump(ast.parse(path.read_text()))
        assert not [name for name in names if re.search(rf"\b{name}\b", code)], path


def test_every_public_thing_has_a_docstring():
    missing = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(str(path))
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{path}:{node.name}"]
    assert not missing


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.S)


def command_lines() -> list[str]:
    lines = []
    for document in ("README.md", "docs/architecture.md"):
        for block in blocks(document, "sh"):
            joined = block.replace("\\\n", " ")
            lines += [line for line in joined.splitlines() if line.startswith("foretell ")]
    return lines


def test_documents_show_commands():
    assert len(command_lines()) >= 8


@pytest.mark.parametrize("line", command_lines())
def test_documented_commands_parse(line):
    """Every `foretell ...` line of the documents is a command that exists, with options that exist."""
    from foretell.cli.main import app

    command, args = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    context = click.Context(command)
    while args and args[0] in getattr(command, "commands", {}):
        name, command, args = command.resolve_command(context, args)
        assert command is not None, f"{line}: no such command"
        context = click.Context(command, parent=context, info_name=name)
    command.make_context(context.info_name, args, parent=context.parent)


def test_the_file_tree_of_the_readme_is_complete():
    text = (ROOT / "README.md").read_text()
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    files = {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    missing = [name for name in sorted(folders | files) if name not in text]
    assert not missing, f"the README's file tree lacks {missing}"


def test_every_dependency_is_explained():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = project["dependencies"] + [
        n for extra in project["optional-dependencies"].values() for n in extra
    ]
    missing = [name for name in (re.split(r"[<>=\[]", n)[0] for n in names) if f"`{name}`" not in text]
    assert not missing, f"docs/architecture.md gives no reason for {missing}"


def test_the_package_carries_its_data():
    import tomllib

    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/foretell"]
    for name in ("kernels/native/attend.c", "bench/data/edit.jsonl", "py.typed"):
        assert (PACKAGE / name).exists()
