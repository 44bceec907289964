"""What goes wrong around a server: clients that leave, queues that fill, steps that fail, signals, keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from foretell.api import LLM
from foretell.errors import InputError
from foretell.server import Settings
from foretell.types import EMPTY_TREE, NO_NEEDS, SamplingParams
from tests.server_process import start, url_of
from tests.serving import serving

MARK = 77  # a token that no other prompt here has


class Explosive:
    """A drafter that raises when it is asked about a prompt that begins with MARK."""

    needs, expects, draft_tokens = NO_NEEDS, 0.0, 2

    def start(self, request): ...

    def propose(self, requests, plans):
        return [EMPTY_TREE for _ in requests]

    def observe(self, request, seen):
        if request.tokens[0] == MARK:
            raise RuntimeError("boom")

    def finish(self, request): ...

    def forget(self): ...


@pytest.fixture(scope="module")
def server(tiny_gguf):
    make = lambda: LLM(tiny_gguf, drafter="ngram", draft_tokens=3, max_batch=4)  # noqa: E731
    with serving(make, max_queue=8, timeout=20.0) as running:
        yield running


@pytest.fixture(scope="module")
def loaded(server):
    return server.service.worker.llm.loaded


def body(server, **changes):
    given = {"model": server.model, "prompt": "the", "max_tokens": 240, "ignore_eos": True, "temperature": 0}
    return given | changes


def leases(server) -> int:
    return len(server.service.worker.llm.engine.cache._live)


def test_a_client_that_leaves_a_stream_frees_its_slots_within_a_step(server):
    engine = server.service.worker.llm.engine
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(server, stream=True)) as stream:
        next(stream.iter_lines())
    server.wait_until_idle(2)
    assert leases(server) == 0
    assert engine.stats.emitted < 10_000
    engine.cache.check_integrity()


def test_closing_a_job_ends_it_before_the_next_step(server):
    """Between the command and the end of the request lies at most the step that is running."""
    worker = server.service.worker
    engine = worker.llm.engine

    async def check() -> tuple[int, int, bool]:
        params = SamplingParams(max_tokens=240, ignore_eos=True)
        job = await worker.submit([[5, 6, 7]], [params])
        pieces = job.pieces(asyncio.get_running_loop().time() + 10)
        await anext(pieces)
        worker.close(job)
        before = engine.stats.steps  # no fewer than when the command was given, however busy the machine is
        after, live = await worker.ask(lambda llm: (llm.engine.stats.steps, len(llm.engine.cache._live)))
        return before, after, live == 0

    before, after, free = asyncio.run_coroutine_threadsafe(check(), worker._loop).result(10)
    assert free
    assert after - before <= 1
    assert engine.idle


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer(server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body(server, n=12, temperature=1), timeout=0.05)
    server.wait_until_idle(2)
    assert leases(server) == 0


def test_more_clients_than_the_queue_holds(server):
    """200 at once, 4 run and 8 wait: each is answered or told when to come back, and nothing else."""
    wanted = httpx.post(f"{server.url}/v1/completions", json=body(server, max_tokens=20)).json()

    async def one(client):
        return await client.post("/v1/completions", json=body(server, max_tokens=20))

    async def all_at_once():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(200)))

    answers = asyncio.run(all_at_once())
    codes = {code: sum(a.status_code == code for a in answers) for code in (200, 429)}
    assert sum(codes.values()) == 200
    assert codes[200] >= 12
    assert codes[429] > 0
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"] == wanted["choices"]
        else:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    server.wait_until_idle()
    assert "foretell:requests_refused_total" in httpx.get(f"{server.url}/metrics").text


def test_a_rate_limit_is_openais_exception(server):
    client = server.client()
    given = _openai(server, stream=True, n=4, temperature=1)
    streams = [client.completions.create(**given) for _ in range(3)]
    try:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**given)
    finally:
        for stream in streams:
            stream.close()
    server.wait_until_idle()


def _openai(server, **changes):
    extra = {"ignore_eos": True}
    return {"model": server.model, "prompt": "the", "max_tokens": 240, "extra_body": extra} | changes


def test_a_step_that_fails_ends_its_request_and_no_other(loaded):
    def make():
        return LLM(loaded, drafter=Explosive(), draft_tokens=2)

    with serving(make) as server:
        url = f"{server.url}/v1/completions"
        wanted = httpx.post(url, json=body(server, max_tokens=40)).json()["choices"]

        async def together():
            async with httpx.AsyncClient(timeout=30) as client:
                good = [client.post(url, json=body(server, max_tokens=40)) for _ in range(3)]
                bad = client.post(url, json=body(server, prompt=[MARK, 5]))
                return await asyncio.gather(*good, bad)

        *good, bad = asyncio.run(together())
        assert [answer.json()["choices"] for answer in good] == [wanted] * 3
        assert bad.status_code == 500
        assert bad.json()["error"] == {
            "message": "the step failed: RuntimeError: boom",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        events = httpx.post(url, json=body(server, prompt=[MARK, 5], stream=True)).text
        assert json.loads(events.split("data: ")[-1])["error"]["message"].endswith("boom")
        assert "[DONE]" not in events
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_end_of_the_engines_thread_is_told(loaded, monkeypatch):
    """What fails outside a step concerns everybody: nobody waits for an answer that will not come."""
    with serving(lambda: LLM(loaded, drafter="none"), max_queue=8) as running:
        given_up = []
        running.service.on_fatal(lambda: given_up.append(1))
        monkeypatch.setattr(running.service.metrics, "step", lambda _engine: 1 / 0)
        answers = [httpx.post(f"{running.url}/v1/completions", json=body(running)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "the engine has ended: ZeroDivisionError" in answers[0].json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert given_up == [1]


def test_an_answer_that_takes_too_long(loaded):
    with serving(lambda: LLM(loaded, drafter="none"), timeout=0.05) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body(server, n=16, temperature=1))
        assert answer.status_code == 504
        assert "within 0.05 s" in answer.json()["error"]["message"]
        events = httpx.post(
            f"{server.url}/v1/completions", json=body(server, n=16, temperature=1, stream=True)
        ).text
        assert "within 0.05 s" in events
        server.wait_until_idle()


def test_keys_and_pages(loaded):
    with serving(lambda: LLM(loaded, drafter="none"), api_key="s3cret", cors=("https://a.org",)) as server:
        for key in (None, "wrong"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        client = server.client(api_key="s3cret")
        assert client.models.list().data[0].id == server.model
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="other").models.list()
        asked = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(f"{server.url}/v1/completions", headers=asked)
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://a.org"
        other = httpx.options(f"{server.url}/v1/completions", headers={**asked, "Origin": "https://b.org"})
        assert "Access-Control-Allow-Origin" not in other.headers
        refused = httpx.post(f"{server.url}/v1/completions", headers={"Origin": "https://a.org"})
        assert refused.headers["Access-Control-Allow-Origin"] == "https://a.org", "errors can be read, too"


def test_memory_is_flat_over_many_requests(server):
    """500 short requests, half of them streams; after the first hundred nothing more is kept."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    url = f"{server.url}/v1/completions"
    with httpx.Client() as client:
        for number in range(500):
            stream = number % 2 == 0
            answer = client.post(url, json=body(server, prompt=f"{number}", max_tokens=4, stream=stream))
            assert answer.status_code == 200
            if number == 100:
                first = resident()
    server.wait_until_idle()
    assert resident() - first < 8 << 20
    worker = server.service.worker
    assert not worker._jobs
    assert not worker._open
    assert not worker.llm.engine._started


def test_random_requests_find_no_server_error(server):
    """By the OpenAPI document, valid ones and others."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: dict[int, int] = {}
    for found in schema.get_all_operations():

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=found.ok().as_strategy())
        def check(case):
            answer = case.call(timeout=30)
            assert answer.status_code < 500, answer.text
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

        check()
    assert {200, 400, 404} <= set(seen)


@pytest.mark.parametrize("grace", ["20", "0"])
def test_told_to_stop_under_load(grace, tiny_gguf, loaded, tmp_path):
    """With time, running streams end as they would have; without, each gets an error. Exit code 0."""
    log = (tmp_path / "log").open("w+")
    process = start(tiny_gguf, log, "--grace", grace, "--drafter", "none", "--log-json")
    try:
        url = url_of(tmp_path / "log", process)
        given = {"model": "tiny.gguf", "prompt": "the", "max_tokens": 240, "ignore_eos": True, "stream": True}

        async def one(client, number):
            text = ""
            async with client.stream("POST", "/v1/completions", json={**given, "n": 4, "seed": number}) as s:
                async for line in s.aiter_lines():
                    if not text:
                        begun.append(number)
                    text += line + "\n"
                    if len(begun) == 4 and not stopped:
                        stopped.append(process.send_signal(signal.SIGTERM))
            return text

        begun: list[int] = []
        stopped: list[None] = []

        async def run():
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                return await asyncio.gather(*(one(client, i) for i in range(4)))

        texts = asyncio.run(run())
        assert process.wait(30) == 0
    finally:
        process.kill()
    for text in texts:
        if grace == "0":
            assert json.loads(text.strip().split("data: ")[-1])["error"]["message"] == (
                "the server is shutting down"
            )
        else:
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"finish_reason":"length"') == 4
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line[:1] == "{"]
    ended = [r for r in records if r.get("path") == "/v1/completions"]
    assert len(ended) == 4
    assert all(r["completion_tokens"] == 960 for r in ended) or grace == "0"
    read = len(loaded.tokenizer.encode("the"))
    assert all(r["request_id"].startswith("req-") and r["prompt_tokens"] == read for r in ended)


def test_a_server_that_stops_takes_nothing_new(tiny_gguf, tmp_path):
    log = (tmp_path / "log").open("w+")
    process = start(tiny_gguf, log, "--grace", "20", "--drafter", "none")
    try:
        url = url_of(tmp_path / "log", process)
        given = {"model": "tiny.gguf", "prompt": "the", "max_tokens": 240, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json={**given, "n": 16, "temperature": 1}) as s:
            lines = s.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            refused = httpx.get(f"{url}/health")
            list(lines)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert refused.status_code == 503


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_queue": -1}, "max_queue must be 0 or above, got -1"),
        ({"max_body": 5}, "max_body must be at least 1024 bytes, got 5"),
        ({"timeout": 0.0}, "timeout must be above 0"),
        ({"grace": -1.0}, "grace must be 0 seconds or above"),
        ({"api_key": " "}, "api_key must be not empty"),
        ({"cors": ("example.org",)}, "cors must be an origin"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(InputError, match=message):
        Settings(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "99999"), "cannot listen on 127.0.0.1:99999"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
        (("--max-queue", "-3"), "max_queue must be 0 or above"),
        (("-m", "no-such-model"), "no-such-model"),
        (("--max-batch", "0"), "max_batch must be at least 1"),
    ],
)
def test_bad_options_are_an_error_with_exit_code_2(options, message):
    command = [sys.executable, "-m", "foretell", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("depth", [50, 250, 300, 320, 340, 400, 480, 900, 5000])
def test_a_body_that_is_nested_deeply_is_refused(server, depth):
    """Between too deep for the parser and a wrong value lies what later checks recurse into."""
    value = '{"a":' * depth + "1" + "}" * depth
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "n", "schema": {value}}}}}'
    chat = {"model": server.model, "messages": [{"role": "user", "content": "the"}], "max_tokens": 2}
    plain = ("completions", body(server, max_tokens=2))
    for path, fields, field, text in (
        *((*plain, field, value) for field in ("metadata", "prompt", "logit_bias", "foretell")),
        *(("chat/completions", chat, field, value) for field in ("messages", "tools", "tool_choice")),
        ("chat/completions", chat, "response_format", schema),
    ):
        content = f'{json.dumps(fields)[:-1]}, "{field}": {text}}}'
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/{path}", content=content.encode(), headers=headers)
        assert answer.status_code == 400, (path, field, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
