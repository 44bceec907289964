"""The heads that come with the package: their text is plain decoding's, and they are worth their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foretell.heads.shipped as shipped_module
from foretell.api import LLM
from foretell.heads.shipped import shipped_head
from foretell.types import SamplingParams

FOLDER = Path(shipped_module.__file__).with_suffix("")
KINDS = sorted(path.name for path in (FOLDER / "smollm2-135m").iterdir())
QUESTIONS = [
    "What is 7 times 12? Show the steps.",
    "Write a short poem about the sea.",
    "Translate to English: Der Hund schläft unter dem Tisch.",
    "Write a Python function that reverses a string.",
]
LEAST = {"eagle3": 1.5}  # tokens of a step on these prompts


@pytest.fixture(scope="module")
def plain():
    return LLM("smollm2-135m", drafter="none")


@pytest.mark.real
@pytest.mark.xdist_group("real heads")
@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_head_drafts_the_same_text(kind, plain):
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    llm = LLM(plain.loaded, drafter=kind, draft_tokens=4)
    for params in (
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=24, temperature=0.8, seed=3),
    ):
        wanted = [answer.token_ids for answer in plain.generate(prompts, params)]
        found = llm.generate(prompts, params)
        assert [answer.token_ids for answer in found] == wanted
        if params.temperature == 0:
            steps = sum(answer.stats.drafts for answer in found)
            assert 1 + sum(answer.stats.accepted for answer in found) / steps > LEAST[kind]


def test_they_are_small_and_say_where_they_come_from():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    for kind in KINDS:
        folder = shipped_head("smollm2-135m", kind)
        assert folder == shipped_head("HuggingFaceTB/SmolLM2-135M-Instruct", kind)
        about = json.loads((folder / "provenance.json").read_text())
        assert about["run"]["kind"] == kind
        assert about["run"]["target"] == "smollm2-135m"
        assert about["evaluations"]
    assert shipped_head("smollm2-1.7b", "eagle3") is None
    assert shipped_head("smollm2-135m2", "eagle3") is None
