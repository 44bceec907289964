"""SmolLM2-135M served: sixteen conversations at once say what each says alone, offline and without drafts."""

from __future__ import annotations

import asyncio

import openai
import pytest

from foretell.api import LLM
from foretell.types import SamplingParams
from tests.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real server")]

QUESTIONS = (
    "Name three rivers of Europe.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Repeat: one two three one two three one two three.",
)


@pytest.fixture(scope="module")
def plain():
    return LLM("smollm2-135m", drafter="none")


def test_sixteen_conversations_at_once(plain):
    """Greedy and seeded, short and long, in an arena that is too small for all of them together."""
    asked = []
    for number in range(16):
        turns = [{"role": "user", "content": f"{QUESTIONS[number % 4]} ({number // 4})"}]
        sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
        asked.append((turns, {"max_tokens": (8, 24, 16, 40)[number // 4], **sampled}))
    wanted = [plain.generate(turns, SamplingParams(**params))[0] for turns, params in asked]

    async def one(client, turns, params):
        stream = await client.chat.completions.create(
            model="smollm2-135m",
            messages=turns,
            stream=True,
            extra_body={"foretell": {"tokens": True}},
            **params,
        )
        ids, text = [], ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            ids += [token["id"] for token in chunk.to_dict().get("foretell", {"tokens": []})["tokens"]]
        return ids, text

    async def all_at_once(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=300) as client:
            return await asyncio.gather(*(one(client, *each) for each in asked))

    # a fixed number: whether the planner finds drafts worth it depends on the machine
    with serving(lambda: LLM(plain.loaded, kv_tokens=900, draft_tokens=4)) as server:
        found = asyncio.run(all_at_once(server.url))
        server.wait_until_idle()
        engine = server.service.worker.llm.engine
        engine.cache.check_integrity()
        assert engine.stats.accepted > 0
    assert [ids for ids, _ in found] == [answer.token_ids for answer in wanted]
    assert [text for _, text in found] == [answer.text for answer in wanted]
