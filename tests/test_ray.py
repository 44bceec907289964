"""The server on a local Ray cluster."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest

from foretell.api import LLM
from foretell.errors import InputError
from foretell.types import SamplingParams

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
serve = pytest.importorskip("ray.serve")


@contextmanager
def cluster(**given):
    """The address of an application on a local cluster."""
    from foretell.server.ray import build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"drafter": "none", "max_batch": 4, "actor": {"num_cpus": 0.5}, **given}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def url(tiny_gguf):
    with cluster(model=str(tiny_gguf), replicas=2, max_queue=4) as address:
        yield address


def replicas() -> int:
    """Engines that can be asked."""
    (app,) = serve.status().applications.values()
    return app.deployments["foretell-engine"].replica_states.get("RUNNING", 0)


def wait_for(wanted: int, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while replicas() != wanted:
        assert time.monotonic() < end, f"{replicas()} replicas run, not {wanted}"
        time.sleep(0.2)


def test_the_same_app_with_the_same_answers(url, tiny_gguf):
    llm = LLM(tiny_gguf, drafter="none")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    for prompt in ("one", "two", "three"):
        wanted = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0.9, seed=4))[0].text
        given = {"model": "tiny.gguf", "prompt": prompt, "max_tokens": 12, "temperature": 0.9, "seed": 4}
        assert client.completions.create(**given).choices[0].text == wanted
        chunks = client.completions.create(stream=True, **given)
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    with pytest.raises(openai.BadRequestError, match="echo is not supported"):
        client.completions.create(model="tiny.gguf", prompt="x", extra_body={"echo": True})
    answer = httpx.get(f"{url}/health", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers.get_list("X-Request-Id")) == (200, ["mine"])
    assert len(httpx.get(f"{url}/v1/models").headers.get_list("X-Request-Id")) == 1
    large = httpx.post(f"{url}/v1/completions", content=b"x" * (5 << 20))
    assert (large.status_code, "more than" in large.json()["error"]["message"]) == (413, True)


def test_prompts_return_to_where_they_were_read(url):
    """Two long beginnings, asked in turn: each is read once, by one replica."""
    hits = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for turn in range(6):
            prompt = [(7 if turn % 2 else 11) * i % 90 + 5 for i in range(1, 121)] + [turn + 5]
            given = {"model": "tiny.gguf", "prompt": prompt, "temperature": 0, "max_tokens": 4}
            usage = client.post("/v1/completions", json=given).json()["usage"]
            hits.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert hits == [0, 0, 120, 120, 120, 120]


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s`:DeprecationWarning")
def test_replicas_come_with_the_load_and_go_with_it(tiny_gguf):
    """From one to two while eight clients ask without a pause, each hears what is said offline; then back."""
    ray.shutdown()
    wanted = LLM(tiny_gguf, drafter="none").generate(
        "the cat", SamplingParams(max_tokens=200, temperature=0.9, seed=4, ignore_eos=True)
    )
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    quickly = {
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "look_back_period_s": 1,
        "metrics_interval_s": 0.2,
    }
    with cluster(model=str(tiny_gguf), autoscaling=scaling | quickly) as address:
        given = {"model": "tiny.gguf", "prompt": "the cat", "max_tokens": 200, "ignore_eos": True}
        given |= {"temperature": 0.9, "seed": 4}
        wait_for(1)
        enough, texts = threading.Event(), []

        def ask() -> None:
            with httpx.Client(base_url=address, timeout=120) as client:
                while not enough.is_set():
                    answer = client.post("/v1/completions", json=given)
                    texts.append(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask) for _ in range(8)]
            try:
                wait_for(2)
            finally:
                enough.set()
            for each in asking:
                each.result()
        assert len(texts) > 8
        assert set(texts) == {wanted[0].text}
        wait_for(1)
        assert httpx.post(f"{address}/v1/completions", json=given).json()["choices"][0]["text"] == texts[0]


def test_what_cannot_be_built():
    from foretell.server.ray import build

    with pytest.raises(InputError, match="exclude each other"):
        build({"replicas": 2, "autoscaling": {"max_replicas": 3}})
    with pytest.raises(InputError, match="max_queue must be"):
        build({"max_queue": -1})
    build({"autoscaling": {"min_replicas": 1, "max_replicas": 3}})
