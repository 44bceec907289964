"""The server on a local Ray cluster."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest

from foretell.api import LLM
from foretell.errors import InputError
from foretell.types import SamplingParams

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
serve = pytest.importorskip("ray.serve")


@pytest.fixture(scope="module")
def url(tiny_gguf):
    from foretell.server.ray import build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        given = {"model": str(tiny_gguf), "drafter": "none", "replicas": 2, "max_batch": 4, "max_queue": 4}
        serve.run(build(given | {"actor": {"num_cpus": 0.5}}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


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


def test_what_cannot_be_built():
    from foretell.server.ray import build

    with pytest.raises(InputError, match="exclude each other"):
        build({"replicas": 2, "autoscaling": {"max_replicas": 3}})
    with pytest.raises(InputError, match="max_queue must be"):
        build({"max_queue": -1})
    build({"autoscaling": {"min_replicas": 1, "max_replicas": 3}})
