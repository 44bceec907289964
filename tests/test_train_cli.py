"""`foretell train` as it is used: killed at any moment, run again, and the head drafts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests import gguf_files

pytestmark = pytest.mark.xdist_group("train")  # the fixtures are made once

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs")


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    gguf_files.write(root / "tiny.gguf")
    lines = [{"prompt": " ".join(WORDS[(n * k + n // 10) % 10] for k in range(1, 6))} for n in range(30)]
    (root / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n\n")
    return root, os.environ | {"FORETELL_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}


def arguments(root, out, kind="eagle3", *more):
    return [
        "train", kind, "--target", str(root / "tiny.gguf"), "--data", str(root / "data.jsonl"),
        "--out", str(root / out), "--cache", str(root / f"{out}-cache"), "--max-tokens", "16",
        "--epochs", "2", "--rows", "90", "--save", "2", "--held", "4", "--draft-vocab", "40", "--json", *more,
    ]  # fmt: skip


def start(root, out, env):
    command = [sys.executable, "-m", "foretell", *arguments(root, out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)


@pytest.fixture(autouse=True)
def _home(setup, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", setup[1]["FORETELL_HOME"])


def losses(root, out):
    state = torch.load(root / out / "run" / "checkpoint.pt", weights_only=True)
    return [entry["loss"] for entry in state["progress"]["log"] if "loss" in entry]


def test_kill_and_go_on(setup, foretell):
    """SIGKILL while answers are made, and while the head is trained: the same losses to the last bit."""
    root, env = setup
    code, out, err = foretell(*arguments(root, "whole"))
    assert code == 0, err
    said = json.loads(out)
    assert said["al"] >= 1
    about = json.loads((root / "whole" / "provenance.json").read_text())
    assert about["skipped_lines"] | {"repeated": 0} == {"repeated": 0, "not JSON": 1, "empty": 1}
    assert "1 not JSON" in err
    assert about["steps"] == len(losses(root, "whole")) > 4
    assert (root / "whole" / "curves.png").stat().st_size > 1000
    for wanted in ("cut-cache/answers-*", "cut/run/checkpoint.pt"):
        running = start(root, "cut", env)
        while not list(root.glob(wanted)):
            assert running.poll() is None, running.communicate()
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    code, out, err = foretell(*arguments(root, "cut"))
    assert code == 0, err
    assert losses(root, "cut") == losses(root, "whole")
    assert json.loads(out)["al"] == said["al"]
    assert drafts(foretell, root, f"eagle3:{root / 'cut'}") == drafts(foretell, root, "none")


def drafts(foretell, root, drafter):
    """The tokens of an answer; with a drafter some were drafted."""
    model, few = str(root / "tiny.gguf"), ("--draft-tokens", "3") if drafter != "none" else ()
    code, out, err = foretell(
        "generate", "the cat", "-m", model, "--json", "--drafter", drafter, "--max-tokens", "12", *few
    )
    assert code == 0, err
    answer = json.loads(out)
    assert drafter == "none" or answer["stats"]["drafted"] > 0
    return answer["token_ids"]


@pytest.mark.parametrize("kind", ["draft", "medusa", "mtp"])
def test_the_other_kinds_train_and_draft(kind, setup, foretell):
    root, _ = setup
    more = ["--width", "16", "--layers", "2"] if kind == "draft" else ["--depths", "2"]
    code, out, err = foretell(*arguments(root, kind, kind, *more))
    assert code == 0, err
    assert json.loads(out)["folder"] == str(root / kind)
    assert ("--depths has no effect" in err) == (kind == "medusa")
    assert ("--draft-vocab has no effect" in err) == (kind == "draft")
    assert drafts(foretell, root, f"{kind}:{root / kind}") == drafts(foretell, root, "none")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--rate", "nan"], "rate must be above 0, got nan"),
        (["--loss", "mse"], "unknown loss 'mse'"),
        (["--draft-vocab", "100000"], "draft_vocab must be at most the target's vocabulary"),
        (["--data", "/nowhere.jsonl"], "neither a .jsonl file nor a folder"),
        (["--held", "90"], "too few"),
        (["--init", "/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_bad_input_is_refused(more, message, setup, foretell):
    root, _ = setup
    code, _, err = foretell(*arguments(root, "whole", "eagle", *more, "--out", str(root / "bad")))
    assert code == 2
    assert message in err
