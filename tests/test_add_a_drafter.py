"""docs/add-a-drafter.md, step by step: its files, its entry point, its commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DOC = Path(__file__).parent.parent / "docs" / "add-a-drafter.md"


def code_blocks() -> dict[str, str]:
    """File name -> content for blocks that a file name introduces; "sh" -> the commands."""
    text = DOC.read_text()
    files: dict[str, str] = dict(re.findall(r"`([\w.]+)`:\n```\w+\n(.*?)```", text, re.S))
    (files["sh"],) = re.findall(r"```sh\n(.*?)```", text, re.S)
    return files


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """What `pip install .` leaves: the module, and the metadata with its entry points."""
    blocks, folder = code_blocks(), tmp_path_factory.mktemp("site")
    project = tomllib.loads(blocks["pyproject.toml"])["project"]
    for module in tomllib.loads(blocks["pyproject.toml"])["tool"]["setuptools"]["py-modules"]:
        (folder / f"{module}.py").write_text(blocks[f"{module}.py"])
    info = folder / "foretell_parrot-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def foretell(site: Path, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from foretell.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_it_is_listed_with_its_options(site):
    listed = json.loads(foretell(site, "drafters", "--json").stdout)["drafters"]
    (parrot,) = [entry for entry in listed if entry["name"] == "parrot"]
    assert parrot["about"] == "says the last words again"
    assert parrot["options"] == [
        {"name": "words", "type": "int", "default": 3, "about": "tokens that it repeats."}
    ]


def test_its_options_are_checked_like_any_others(site):
    for option, message in (
        ("words=0", "words must be at least 1, got 0"),
        ("words=x", "words must be an integer, got 'x'"),
        ("word=1", "has no option 'word'"),
    ):
        done = foretell(site, "generate", "hi", "--drafter", "parrot", "--drafter-opt", option)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


@pytest.mark.real
@pytest.mark.xdist_group("real")
def test_every_command_of_the_page_runs(site, tmp_path):
    commands = [line for line in code_blocks()["sh"].splitlines() if line]
    assert len(commands) == 4

    outputs = []
    for command in commands:
        program, *args = shlex.split(command)
        assert program == "foretell"
        done = foretell(site, *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[1] == outputs[2], "the drafter does not change the answer"
    plain = foretell(
        site, "generate", "Say it again and again and again.", "--drafter", "none", "--max-tokens", "16"
    )
    assert plain.stdout == outputs[1]
    assert "parrot" in outputs[3]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise RuntimeError('boom')", "cannot be loaded: boom"),
        ("ENTRY = 3", "is no DrafterEntry"),
    ],
)
def test_a_broken_package_is_named(module, message, tmp_path):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (tmp_path / "broken_drafter.py").write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[foretell.drafters]\nbroken = broken_drafter:ENTRY\n")
    done = foretell(tmp_path, "drafters")
    assert done.returncode == 2
    assert message in done.stderr
    assert "broken" in done.stderr


def test_a_taken_name_is_refused(tmp_path):
    info = tmp_path / "taken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: taken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[foretell.drafters]\nngram = foretell.drafters.builtin:ENTRY\n")
    (tmp_path / "taken.py").write_text("")
    done = foretell(tmp_path, "drafters")
    assert done.returncode == 2
    assert "ngram" in done.stderr
