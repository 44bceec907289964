"""The server as OpenAI's own client sees it: answers, streams, errors, and offline's text."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from foretell.api import LLM
from foretell.types import SamplingParams
from tests.serving import serving

pytestmark = pytest.mark.xdist_group("server")  # the fixtures are made once

CHAT = [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def llm(tiny_gguf):
    """Offline, without drafts."""
    return LLM(tiny_gguf, drafter="none")


@pytest.fixture(scope="module")
def server(tiny_gguf):
    make = lambda: LLM(tiny_gguf, drafter="ngram", drafter_options={"min_n": 1})  # noqa: E731
    with serving(make, max_body=100_000) as running:
        yield running


@pytest.fixture
def client(server):
    yield server.client()
    server.wait_until_idle()


@pytest.fixture(scope="module")
def ask(server):
    """What both kinds of request begin with."""
    return {"model": server.model, "temperature": 0.0, "max_tokens": 12}


def test_models(client, server):
    (model,) = client.models.list().data
    assert model.id == server.model == "tiny.gguf"
    assert client.models.retrieve("tiny.gguf").id == "tiny.gguf"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_chat_is_offlines(client, ask, llm):
    (wanted,) = llm.generate(CHAT, SamplingParams(max_tokens=12))
    answer = client.chat.completions.create(messages=CHAT, **ask)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (wanted.prompt_tokens, len(wanted.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_is_the_whole_one(client, ask):
    whole = client.chat.completions.create(messages=CHAT, **ask)
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, stream=True, stream_options={"include_usage": True}, **ask
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    last = chunks[-1]
    assert last.choices == []
    assert (last.usage.completion_tokens, last.usage.total_tokens) == (12, whole.usage.total_tokens)
    assert len({c.id for c in chunks}) == 1


def test_content_in_parts_and_the_newer_name_of_the_limit(client, ask):
    parts = [{"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "he"}]}]
    given = {**ask, "max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 12}
    in_parts = client.chat.completions.create(messages=parts, **given)
    assert (
        in_parts.choices[0].message == client.chat.completions.create(messages=CHAT, **ask).choices[0].message
    )


def test_an_answer_can_be_sent_back(client, ask):
    first = client.chat.completions.create(messages=CHAT, **ask)
    turns = [*CHAT, first.choices[0].message, {"role": "user", "content": "and"}]
    second = client.chat.completions.create(messages=turns, **ask)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_completions_of_text_ids_and_lists(client, ask, llm):
    ids = llm.encode("one")
    wanted = {p: llm.generate(p, SamplingParams(max_tokens=12))[0].text for p in ("one", "two")}
    for prompt, texts in (
        ("one", ["one"]),
        (ids, ["one"]),
        (["one", "two"], ["one", "two"]),
        ([ids, llm.encode("two")], ["one", "two"]),
    ):
        answer = client.completions.create(prompt=prompt, **ask)
        assert [c.text for c in answer.choices] == [wanted[text] for text in texts]
        assert [c.index for c in answer.choices] == list(range(len(texts)))


def test_several_answers_to_several_prompts(client, ask, llm):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=2)
    wanted = [answer.text for answer in llm.generate(["one", "two"], params)]
    given = {**ask, "temperature": 1.0, "seed": 5, "n": 2, "prompt": ["one", "two"]}
    answer = client.completions.create(**given)
    assert [c.text for c in answer.choices] == wanted
    assert answer.usage.completion_tokens == 48
    texts = [""] * 4
    for chunk in client.completions.create(stream=True, **given):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


PARAMETERS = {
    "stop": ({"stop": ["dd", "zz"]}, {"stop": ("dd", "zz")}),
    "one stop": ({"stop": "!"}, {"stop": "!"}),
    "bias": ({"logit_bias": {"70": 8.0, "71": 7.5}}, {"logit_bias": {70: 8.0, 71: 7.5}}),
    "penalties": (
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.4}},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.4},
    ),
    "filters": (
        {"temperature": 1.2, "top_p": 0.9, "seed": 3, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"temperature": 1.2, "top_p": 0.9, "seed": 3, "top_k": 20, "min_p": 0.01},
    ),
    "least": (
        {"extra_body": {"min_tokens": 6, "stop_token_ids": [70, 80, 90]}, "temperature": 1.5, "seed": 2},
        {"min_tokens": 6, "stop": (70, 80, 90), "temperature": 1.5, "seed": 2},
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_do_what_they_do_offline(name, client, ask, llm):
    theirs, ours = PARAMETERS[name]
    (wanted,) = llm.generate("there", SamplingParams(max_tokens=30, **ours))
    answer = client.completions.create(**{**ask, "prompt": "there", "max_tokens": 30, **theirs})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted.text, wanted.finish_reason)
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    (bare,) = llm.generate("there", SamplingParams(max_tokens=30))
    assert wanted.token_ids != bare.token_ids, "the parameter has an effect here"


def test_log_probabilities_of_a_chat(client, ask, llm):
    (wanted,) = llm.generate(CHAT, SamplingParams(max_tokens=12, logprobs=3))
    answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **ask)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [entry.logprob for entry in wanted.logprobs]
    assert [[t.logprob for t in e.top_logprobs] for e in content] == [
        list(e.top.values()) for e in wanted.logprobs
    ]
    data = b"".join(bytes(entry.bytes) for entry in content if not entry.token.startswith("<"))
    assert data.decode(errors="replace") == answer.choices[0].message.content
    streamed = client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **ask
    )
    parts = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert parts == content
    none = client.chat.completions.create(messages=CHAT, logprobs=True, **ask)
    assert all(entry.top_logprobs == [] for entry in none.choices[0].logprobs.content)


def test_log_probabilities_of_a_completion(client, ask, llm):
    (wanted,) = llm.generate("one", SamplingParams(max_tokens=12, logprobs=2))
    answer = client.completions.create(prompt="one", logprobs=2, **ask)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == [entry.logprob for entry in wanted.logprobs]
    assert found.text_offset[0] == 0
    assert all(len(top) == 2 for top in found.top_logprobs)
    joined = "".join(found.tokens)
    assert [joined[a:b] for a, b in zip(found.text_offset, found.text_offset[1:], strict=False)] == (
        found.tokens[:-1]
    )


@pytest.fixture(scope="module")
def drafting(tiny_gguf):
    """A server whose drafter remembers answers, and drafts in every step."""
    with serving(lambda: LLM(tiny_gguf, drafter="suffix", draft_tokens=4)) as running:
        yield running


def test_tokens_and_who_proposed_them(drafting, ask, llm):
    client = drafting.client()
    (wanted,) = llm.generate("the the the", SamplingParams(max_tokens=40))
    given = {**ask, "prompt": "the the the", "max_tokens": 40, "extra_body": {"foretell": {"tokens": True}}}
    client.completions.create(**given)
    chunks = [c.to_dict() for c in client.completions.create(stream=True, **given)]
    tokens = [token for chunk in chunks for token in chunk["foretell"]["tokens"]]
    assert [token["id"] for token in tokens] == wanted.token_ids
    assert {token["origin"] for token in tokens} == {"suffix", "target"}
    assert all(token["drafted"] == (token["origin"] == "suffix") for token in tokens)
    facts = chunks[-1]["foretell"]
    assert facts["lossless"] is True
    assert facts["stats"][0]["accepted"] == sum(token["drafted"] for token in tokens) > 0
    whole = client.completions.create(**given).to_dict()
    assert [t["id"] for t in whole["choices"][0]["foretell"]["tokens"]] == wanted.token_ids
    assert "foretell" not in client.completions.create(prompt="the", **ask).to_dict()


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"extra_body": {"echo": True}}, "echo", "echo is not supported"),
        ({"extra_body": {"best_of": 2}}, "best_of", "best_of is not supported"),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "belongs to stream"),
        ({"extra_body": {"foretell": {"token": True}}}, "foretell.token", "not supported"),
        ({"temperature": -1}, "temperature", "got -1"),
        ({"temperature": "warm"}, "temperature", "got 'warm'"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"seed": -1}, "seed", "an integer in 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 500}, "prompt", r"exceed the model's context of 256"),
        ({"logprobs": 21}, "logprobs", "0 .. 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "the key 'x'"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "outside the vocabulary of 304"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 81}, "n", "at most 80"),
        ({"prompt": []}, None, "prompt is empty"),
        ({"prompt": ""}, None, "prompt is empty"),
        ({"prompt": [1, 999]}, "prompt", "999 is outside"),
        ({"prompt": [True]}, "prompt", "valid"),
        ({"prompt": "x" * 10_000}, None, "the prompt has 10000 tokens, the model's context holds 256"),
    ],
)
def test_what_is_refused_and_how(changes, param, message, client, ask):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{**ask, "prompt": "one", **changes})
    error = caught.value
    assert (error.type, error.param) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_a_chat_refuses(changes, param, client, ask):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ask, "messages": CHAT, **changes})
    assert caught.value.param == param


def test_what_is_null_is_not_given(server, ask):
    given = {**ask, "prompt": "one", "max_tokens": 5, "seed": 3}
    nothing = dict.fromkeys(("temperature", "n", "stream", "top_p", "stop", "store", "metadata", "foretell"))
    post = lambda body: httpx.post(f"{server.url}/v1/completions", json=body).json()  # noqa: E731
    del given["temperature"]
    assert post(given | nothing)["choices"] == post(given)["choices"]
    assert "prompt" in post(given | {"prompt": None})["error"]["message"]


def test_an_unknown_model(client, ask):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5' here") as caught:
        client.completions.create(**{**ask, "model": "gpt-5", "prompt": "one"})
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "the body"),
        (b"", 400, "missing"),
        (b'{"model": "\xff"}', 400, "UTF-8"),
        (b'{"model": "tiny.gguf", "prompt": "\\ud800"}', 400, "UTF-8"),
        (b"[" * 50_000, 400, "body"),
        (b'{"model": "tiny.gguf", "prompt": NaN}', 400, "prompt"),
        (b'{"model": "tiny.gguf", "prompt": "x", "temperature": Infinity}', 400, "temperature"),
        (b"x" * 200_000, 413, "more than 100000 bytes"),
    ],
)
def test_bodies_that_are_none(body, status, message, server):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    parts = (body[at : at + 1000] for at in range(0, len(body), 1000))
    again = httpx.post(f"{server.url}/v1/completions", content=parts, headers=headers)
    assert again.status_code == status, "the same without a length in front"


def test_paths_and_methods_that_do_not_exist(server):
    assert httpx.get(f"{server.url}/v1/embeddings").json()["error"]["message"].startswith("GET /v1/emb")
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


def test_request_ids_and_settings_without_effect(server, ask):
    body = {**ask, "prompt": "one", "seed": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["X-Request-Id"] == "mine-7"
    assert answer.headers["X-Foretell-Warning"] == "seed has no effect: temperature is 0, nothing is drawn"
    other = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "x" * 500})
    assert other.headers["X-Request-Id"].startswith("req-")


def test_sixteen_mixed_streams_are_offlines(server, llm):
    """At once, of every kind; each text and each id as alone offline."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.2, "top_p": 0.9, "seed": 8},
        {"temperature": 0.7, "frequency_penalty": 0.8, "seed": 9},
    ]
    asked = []
    for number in range(16):
        limit = 5 + 9 * number
        asked.append(
            (f"text {number % 5} of " * (1 + number % 4), {"max_tokens": limit, **kinds[number % 4]})
        )
    wanted = [llm.generate(prompt, SamplingParams(**params))[0] for prompt, params in asked]

    async def stream(client, prompt, params):
        chunks = client.completions.create(
            model=server.model,
            prompt=prompt,
            stream=True,
            extra_body={"foretell": {"tokens": True}},
            **params,
        )
        text, ids = "", []
        async for chunk in await chunks:
            text += chunk.choices[0].text
            ids += [token["id"] for token in chunk.to_dict()["foretell"]["tokens"]]
        return text, ids

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            return await asyncio.gather(*(stream(client, *each) for each in asked))

    found = asyncio.run(all_at_once())
    assert [ids for _, ids in found] == [answer.token_ids for answer in wanted]
    assert [text for text, _ in found] == [answer.text for answer in wanted]


def test_stats_and_metrics_tell_the_same(drafting, ask):
    server = drafting
    for _ in range(2):
        server.client().completions.create(prompt="the the the", **{**ask, "max_tokens": 60})
    server.wait_until_idle()
    stats = httpx.get(f"{server.url}/stats").json()
    lines = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{server.url}/metrics").text.splitlines()
        if not line.startswith("#")
    )
    totals, count = stats["totals"], lambda name: float(lines[f"foretell:{name}_total"])
    assert count("spec_decode_num_drafts") == totals["drafts"] > 0
    assert count("spec_decode_num_draft_tokens") == totals["drafted"]
    assert count("spec_decode_num_accepted_tokens") == totals["accepted"] > 0
    assert count("generation_tokens") == totals["emitted"]
    at = [
        v for k, v in lines.items() if k.startswith("foretell:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(map(float, at)) >= totals["accepted"]
    assert float(lines["foretell:time_to_first_token_seconds_count"]) > 0
    assert float(lines["foretell:inter_token_latency_seconds_count"]) > 0
    for phase in ("draft", "target", "verify", "rest"):
        found = float(lines[f'foretell:step_seconds_total{{phase="{phase}"}}'])
        assert found == pytest.approx(stats["seconds"][phase], abs=1e-3)
    assert stats["load"]["running"] == stats["load"]["waiting"] == 0
    assert stats["planner"]["kind"] == "FixedPlanner"
    assert sum(stats["planner"]["reasons"].values()) >= totals["steps"]
    assert stats["server"]["drafters"] == ["suffix"]


def test_the_speedup_is_by_the_planners_own_table(server, client, ask):
    client.completions.create(prompt="the the the", **{**ask, "max_tokens": 60})
    stats = httpx.get(f"{server.url}/stats").json()
    assert stats["planner"]["kind"] == "AdaptivePlanner"
    assert 0 < stats["planner"]["cost_ms"]["1"] <= stats["planner"]["cost_ms"]["16"]
    metrics = server.service.metrics
    assert stats["speed"]["plain_equivalent_speedup"] == metrics.plain_s / metrics.decode_s > 0


def test_running_requests_show_in_stats(server, ask):
    body = {**ask, "prompt": "the", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        (request,) = httpx.get(f"{server.url}/stats").json()["requests"] or [None]
        list(lines)
    assert request is not None, "240 tokens were too quick to be seen"
    assert (request["state"], request["max_tokens"]) == ("running", 240)
    assert request["plan"]["reason"]


def test_the_openapi_document_has_the_fields(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] is False
    assert {"messages", "logprobs", "min_p", "foretell"} <= set(schema["properties"])
    assert json.dumps(document)
