"""Several replicas behind one address: who answers what, and what happens when one ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.api import LLM
from foretell.server.routing import Router, blocks, total
from foretell.types import SamplingParams

pytestmark = pytest.mark.xdist_group("replicas")  # the fixtures are made once

SYSTEM = "You are a helpful assistant. " * 20  # two blocks and more


def body(*turns: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": turn} for turn in turns]}).encode()


def test_blocks_name_beginnings():
    first, longer, other = blocks(body(SYSTEM)), blocks(body(SYSTEM, SYSTEM, "x")), blocks(body("a" + SYSTEM))
    assert len(first) == 3
    assert longer[:2] == first[:2]
    assert not set(first) & set(other)
    assert blocks(b"no JSON") == blocks(b"[1]") == blocks(b"[" * 10_000) == []
    assert len(blocks(json.dumps({"prompt": "x" * 100_000}).encode())) == 64


def test_a_conversation_stays_and_others_go_where_there_is_room():
    router, turn = Router(), blocks(body(SYSTEM))
    assert router.rank(turn, {0: 1, 1: 0, 2: 2}) == [1, 0, 2]
    router.remember(1, turn)
    later = blocks(body(SYSTEM, "and then?"))
    assert router.rank(later, {0: 1, 1: 3, 2: 2}) == [1, 0, 2], "it has read the beginning"
    assert router.rank(later, {0: 1, 1: 6, 2: 2}) == [0, 2, 1], "but it has too much to do"
    assert router.rank(later, {0: 1, 2: 0}) == [2, 0], "or cannot take any"
    assert router.rank(blocks(body("x" * 600)), {0: 1, 1: 3, 2: 0}) == [2, 0, 1]
    router.forget(1)
    assert router.rank(later, {0: 1, 1: 3, 2: 2}) == [0, 2, 1]


@given(
    names=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=30),
    loads=st.dictionaries(st.sampled_from("pqrs"), st.integers(0, 9), min_size=1),
)
def test_whoever_comes_first_is_not_overloaded(names, loads):
    router = Router()
    for each in names:
        ranked = router.rank(each, loads)
        assert sorted(ranked) == sorted(loads)
        assert loads[ranked[0]] <= min(loads.values()) + 4
        router.remember(ranked[0], each)


def test_totals_add_up():
    one = {"drafts": 30, "accepted": 60, "al": 3.0, "marginal_acceptance": [0.9, 0.6]}
    two = {"drafts": 10, "accepted": 0, "al": 1.0, "marginal_acceptance": [0.5]}
    added = total([one, two])
    assert added == {"drafts": 40, "accepted": 60, "al": 2.5, "marginal_acceptance": [0.8, 0.45]}


@pytest.fixture(scope="module")
def front(tiny_gguf):
    """Two replicas; yields (process, address, path of the model)."""
    log = tiny_gguf.with_suffix(".log")
    command = [sys.executable, "-m", "foretell", "serve", "-m", str(tiny_gguf), "--port", "0"]
    options = ["--replicas", "2", "--drafter", "none", "--api-key", "key"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *options], stderr=file, stdout=file)
    try:
        yield process, _url(log, process), tiny_gguf
    finally:
        process.kill()


def _url(log: Path, process) -> str:
    for _ in range(3600):  # a busy machine starts two processes slowly
        if found := re.search(r"(http://\S+)/v1 is ready", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture
def http(front):
    with httpx.Client(base_url=front[1], headers={"Authorization": "Bearer key"}, timeout=60) as client:
        yield client


def ask(http, prompt, timeout=60, **changes):
    given = {"model": "tiny.gguf", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    return http.post("/v1/completions", json=given | changes, timeout=timeout)


def test_answers_are_offlines_and_prompts_return_to_where_they_were_read(front, http):
    llm = LLM(front[2], drafter="none")
    client = openai.OpenAI(base_url=f"{front[1]}/v1", api_key="key")
    seen = set()
    for number in range(4):
        prompt = f"{number}" + "the same text " * 4
        wanted = llm.generate(prompt, SamplingParams(max_tokens=8))[0].text
        first = ask(http, prompt)
        assert first.json()["choices"][0]["text"] == wanted
        again = [ask(http, prompt).headers["X-Foretell-Replica"] for _ in range(3)]
        assert set(again) == {first.headers["X-Foretell-Replica"]}
        seen.add(again[0])
        chunks = client.completions.create(
            model="tiny.gguf", prompt=prompt, temperature=0, max_tokens=8, stream=True
        )
        assert "".join(c.choices[0].text for c in chunks) == wanted
    assert client.models.list().data[0].id == "tiny.gguf"
    with pytest.raises(openai.BadRequestError, match="echo is not supported"):
        client.completions.create(model="tiny.gguf", prompt="x", echo=True)


def test_the_front_has_the_key_and_counts_for_all(front, http):
    assert httpx.get(f"{front[1]}/v1/models").status_code == 401
    assert httpx.get(f"{front[1]}/health").json() == {"status": "ok", "replicas": 2}
    assert ask(http, "whatever").status_code == 200
    stats = http.get("/stats").json()
    assert [replica["ready"] for replica in stats["replicas"]] == [True, True]
    lines = http.get("/metrics").text.splitlines()
    emitted = [float(x.split()[-1]) for x in lines if x.startswith("foretell:generation_tokens_total{")]
    assert len(emitted) == 2
    assert sum(emitted) == stats["totals"]["emitted"] > 0


def test_a_replica_that_ends_takes_its_requests_with_it_and_comes_back(front, http):
    given = {"model": "tiny.gguf", "prompt": "the", "max_tokens": 240, "ignore_eos": True, "n": 16}
    killed = None
    text = ""
    with http.stream("POST", "/v1/completions", json=given | {"stream": True}) as stream:
        number = int(stream.headers["X-Foretell-Replica"])
        for line in stream.iter_lines():
            text += line + "\n"
            if killed is None:
                killed = http.get("/stats").json()["replicas"][number]["pid"]
                os.kill(killed, signal.SIGKILL)
    assert json.loads(text.strip().split("data: ")[-1])["error"]["message"] == (
        "the replica that was answering has ended"
    )
    assert ask(http, "other").status_code == 200, "the other one answers meanwhile"
    for _ in range(2400):
        replica = http.get("/stats").json()["replicas"][number]
        if replica["ready"]:
            break
        time.sleep(0.05)
    assert replica["ready"]
    assert (replica["restarts"], replica["load"]) == (1, 0)
    assert replica["pid"] != killed
    assert httpx.get(f"{front[1]}/health").json()["replicas"] == 2


def test_a_client_that_leaves_ends_its_answer_behind_the_front(front, http):
    before = http.get("/stats").json()["totals"]["emitted"]
    with pytest.raises(httpx.ReadTimeout):
        ask(http, "leaving", max_tokens=240, ignore_eos=True, n=64, temperature=1, timeout=0.15)
    for _ in range(400):
        stats = http.get("/stats").json()
        if not stats["load"]["running"] and not any(replica["load"] for replica in stats["replicas"]):
            break
        time.sleep(0.05)
    assert [replica["load"] for replica in stats["replicas"]] == [0, 0]
    assert stats["totals"]["emitted"] - before < 64 * 240


def test_the_front_ends_its_replicas(front, http):
    process = front[0]
    pids = [replica["pid"] for replica in http.get("/stats").json()["replicas"]]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_replicas_that_cannot_start_are_an_error(tmp_path):
    command = [sys.executable, "-m", "foretell", "serve", "--port", "0", "--replicas", "2", "-m", "no-such"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no-such" in done.stderr
    assert "a replica did not start" in done.stderr
    assert "Traceback" not in done.stderr


class Body(httpx.AsyncByteStream):
    async def __aiter__(self):
        yield b"here"


class Dying(httpx.AsyncBaseTransport):
    """Replicas that take a request and say nothing; the last one answers."""

    def __init__(self, deaf):
        self.deaf, self.asked = deaf, []

    async def handle_async_request(self, request):
        self.asked.append(request.url.port)
        if request.url.port in self.deaf:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, stream=Body())


@pytest.mark.parametrize(("deaf", "status", "asked"), [({1}, 200, 2), ({1, 2}, 503, 2), (set(), 200, 1)])
def test_a_request_that_was_lost_goes_to_another_replica_once(deaf, status, asked):
    from foretell.server.front import Front, create_front
    from foretell.server.settings import Settings

    front = Front([["serve"]] * 3, Settings())
    front._client = httpx.AsyncClient(transport=(replicas := Dying(deaf)))
    front.replicas = [
        type("R", (), {"number": n, "url": f"http://x:{n + 1}", "load": n, "pid": None})() for n in range(3)
    ]
    transport = httpx.ASGITransport(app=create_front(front))

    async def ask_once():
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.post("/v1/completions", json={"prompt": "x"})

    answer = asyncio.run(ask_once())
    assert (answer.status_code, len(replicas.asked)) == (status, asked)
    assert [replica.load for replica in front.replicas] == [0, 1, 2]


def test_a_replica_that_cannot_be_started_is_one_that_ended(monkeypatch):
    from foretell.server import replicas

    async def full(*_arguments, **_options):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(replicas.asyncio, "create_subprocess_exec", full)

    async def start():
        async with asyncio.timeout(10):
            return await replicas.Replica(0, ["serve"], {}, lambda _: None).started()

    assert asyncio.run(start()) == os.EX_OSERR


@pytest.mark.parametrize(
    "said",
    [
        "'GET / 200 1 ms http://evil.example/v1 is ready'",
        "'http://evil.example/v1 is ready'",
        "'http://127.0.0.1:9/v1 is ready'",  # what a client could put on a line of its own
        "'x' * 200_000",
    ],
)
def test_what_a_replica_logs_moves_nobody(said, monkeypatch):
    """Only its first word is where it listens; its log holds what clients have written."""
    from foretell.server import replicas

    script = (
        "import os, sys, time; from pathlib import Path\n"
        "print('http://127.0.0.1:8/v1 is ready', file=sys.stderr)\n"
        f"print({said}, file=sys.stderr)\n"
        "print('end', file=sys.stderr, flush=True); time.sleep(60)"
    )
    heard = []
    monkeypatch.setattr("builtins.print", lambda text, **_: heard.append(text))
    real = asyncio.create_subprocess_exec

    async def fake(_python, *_arguments, **options):
        return await real(sys.executable, "-c", script, **options)

    monkeypatch.setattr(replicas.asyncio, "create_subprocess_exec", fake)

    async def watch():
        replica = replicas.Replica(0, ["serve"], {}, lambda _: None)
        assert await replica.started() is None
        while not any(text.startswith("end") for text in heard):
            await asyncio.sleep(0.01)
        url = replica.url
        await replica.stop(0)
        return url

    assert asyncio.run(watch()) == "http://127.0.0.1:8"
