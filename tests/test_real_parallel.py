"""SmolLM2-135M over several ranks: the text of one process, with and without speculation."""

from __future__ import annotations

import pytest

from foretell.api import LLM
from foretell.types import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]

STORY = "The bridge was built of stone, and the river below it was wide. "
PARAMS = {
    "greedy": SamplingParams(max_tokens=14),
    "seeded": SamplingParams(max_tokens=14, temperature=0.8, top_p=0.95, seed=11),
}


@pytest.fixture(scope="module")
def plain():
    return LLM("smollm2-135m", drafter="none")


@pytest.fixture(scope="module")
def prompts(plain):
    questions = ["Why is the sky blue?", "Name three rivers of Europe.", STORY * 10 + "Repeat this text."]
    return [plain.encode([{"role": "user", "content": text}]) for text in questions]


@pytest.fixture(scope="module")
def wanted(plain, prompts):
    """Token ids of one process, by kind of sampling."""
    return {
        name: [answer.token_ids for answer in plain.generate(prompts, params)]
        for name, params in PARAMS.items()
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    llm = LLM("smollm2-135m", drafter="none", context_parallel=request.param, kv_tokens=1024)
    yield llm
    llm.loaded.model.team.close()


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "draft:smollm2-135m", "eagle3"])
def test_text_is_that_of_one_process(wanted, prompts, ranks, drafter):
    more = {} if drafter == "none" else {"draft_tokens": 4}
    llm = LLM(ranks.loaded, drafter=drafter, kv_tokens=1024, **more)
    for name, params in PARAMS.items():
        found = llm.generate(prompts, params)
        assert [answer.token_ids for answer in found] == wanted[name]
        assert all(answer.lossless for answer in found)
    if drafter != "none":
        assert llm.engine.stats.accepted > 5
