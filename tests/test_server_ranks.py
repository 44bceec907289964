"""A server whose model is spread over ranks: same texts, and what clients hear when a rank is lost."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from foretell.api import LLM
from foretell.types import SamplingParams
from tests.server_process import start, url_of

PROMPTS = ["the cat", "a dog and the cat " * 12, "the", "mouse of the house"]


@pytest.fixture
def process(tiny_gguf, tmp_path):
    with (tmp_path / "log").open("w+") as log:
        running = start(
            tiny_gguf, log, "--context-parallel", "2", "--kv-tokens", "512", "--draft-tokens", "3"
        )
        yield running, tmp_path / "log"
        running.kill()


def other_ranks(process) -> list[int]:
    """Processes that this one started."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_texts_are_those_of_one_process_and_a_signal_ends_all(process, tiny_gguf):
    running, log = process
    given = {"model": "tiny.gguf", "max_tokens": 24, "ignore_eos": True}
    how = [{"temperature": 0}, {"temperature": 0.9, "seed": 5}]
    with httpx.Client(base_url=url_of(log, running), timeout=60) as client:

        def ask(prompt, params):
            answer = client.post("/v1/completions", json={**given, "prompt": prompt, **params})
            return answer.json()["choices"][0]["text"]

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, prompt, params) for prompt in PROMPTS for params in how]
            found = [each.result() for each in asked]
    (rank,) = other_ranks(running)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    assert not Path(f"/proc/{rank}").exists()
    plain = LLM(tiny_gguf, drafter="none")
    wanted = [
        plain.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True, **params))[0].text
        for prompt in PROMPTS
        for params in how
    ]
    assert found == wanted


def test_a_lost_rank_is_named_to_every_client_and_ends_the_server(process):
    running, log = process
    given = {"model": "tiny.gguf", "prompt": "the", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{url_of(log, running)}/v1/completions", json={**given, "n": 2}, timeout=60
    ) as s:
        lines = s.iter_lines()
        next(lines)
        (rank,) = other_ranks(running)
        os.kill(rank, signal.SIGKILL)
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "rank 1 was ended by signal 9" in error["message"]
    assert running.wait(30) == 1
    assert "rank 1 was ended by signal 9" in log.read_text()
