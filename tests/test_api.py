"""The library's face: prompts of every kind, streams side by side, threads, what is refused."""

from __future__ import annotations

import threading

import pytest

from foretell.api import LLM
from foretell.errors import InputError
from foretell.types import SamplingParams
from tests import gguf_files

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("api") / "tiny.gguf"
    gguf_files.write(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        return LLM(path, drafter="ngram")


def test_a_prompt_is_text_ids_or_a_conversation(llm):
    messages = [{"role": "user", "content": "the"}]
    text = llm.tokenizer.render(messages)
    ids = llm.tokenizer.encode(text, special=False)
    answers = [llm.generate(prompt, PARAMS)[0] for prompt in (text, ids, tuple(ids), messages)]
    batch = llm.generate([text, ids, messages], PARAMS)
    assert len({tuple(answer.token_ids) for answer in (*answers, *batch)}) == 1
    assert answers[0].prompt_tokens == len(ids)


def test_numpy_ids_are_ids(llm):
    import numpy as np

    ids = llm.encode("the")
    assert llm.generate(np.array(ids), PARAMS)[0].token_ids == llm.generate(ids, PARAMS)[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no prompts were given"),
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        (5, "a prompt must be text, token ids, or messages, got int 5"),
        ([1.5, 2], "a prompt must be"),
        ([{"role": "user"}], "a message's content must be text, got None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a message's content must be text"),
    ],
)
def test_other_prompts_are_refused(llm, prompt, message):
    with pytest.raises(InputError, match=message):
        llm.generate(prompt, PARAMS)
    assert llm.engine.idle


def test_one_bad_prompt_of_many_refuses_all_before_anything_runs(llm):
    with pytest.raises(InputError, match="prompt has"):
        llm.generate(["fine", "x" * 300], PARAMS)
    assert llm.engine.idle


def test_params_per_prompt(llm):
    first, second = llm.generate(["one", "two"], [PARAMS, SamplingParams(max_tokens=2)])
    assert (len(first.token_ids), len(second.token_ids)) == (12, 2)
    with pytest.raises(InputError, match="params: 1 given for 2 prompts"):
        llm.generate(["one", "two"], [PARAMS])


def test_streams_side_by_side_and_a_call_between_lose_nothing(llm):
    wanted = [llm.generate(text, PARAMS)[0] for text in ("one", "two", "three")]
    first, second = llm.stream("one", PARAMS), llm.stream("two", PARAMS)
    texts = {first: "", second: ""}
    for a, b in zip(first, second, strict=False):
        texts[first] += a.text
        texts[second] += b.text
        if llm.generate("three", PARAMS)[0].token_ids != wanted[2].token_ids:
            pytest.fail("the call between was disturbed")
    for stream in texts:
        texts[stream] += "".join(chunk.text for chunk in stream)
    assert [texts[first], texts[second]] == [wanted[0].text, wanted[1].text]
    assert [first.completion.token_ids, second.completion.token_ids] == [w.token_ids for w in wanted[:2]]


def test_a_stream_frees_its_slots_however_it_ends(llm):
    llm.stream("never read", PARAMS).close()
    assert llm.engine.idle
    with llm.stream("left early", PARAMS) as stream:
        next(stream)
    assert llm.engine.idle
    stream = llm.stream("forgotten", PARAMS)
    del stream
    assert llm.engine.idle
    stream = llm.stream("closed twice", PARAMS)
    next(stream)
    stream.close()
    stream.close()
    assert stream.completion.finish_reason == "abort"
    llm.engine.cache.check_integrity()


def test_a_stream_that_runs_has_no_completion_yet(llm):
    with llm.stream("hello", PARAMS) as stream:
        next(stream)
        with pytest.raises(ValueError, match="has not ended"):
            _ = stream.completion
    with pytest.raises(InputError, match="n must be 1"):
        llm.stream("hello", SamplingParams(n=2, temperature=1.0))


def test_two_llms_in_two_threads(llm):
    """The compiled kernels keep no state between calls that two engines would share."""
    wanted = {d: llm.generate(f"the {d}", SamplingParams(max_tokens=40))[0].token_ids for d in "ab"}
    found: dict[str, list[list[int]]] = {"a": [], "b": []}

    def work(name: str) -> None:
        own = LLM(llm.loaded, drafter="none", kv_tokens=128)
        for _ in range(4):
            found[name].append(own.generate(f"the {name}", SamplingParams(max_tokens=40))[0].token_ids)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [wanted[name]] * 4 for name in "ab"}


def test_a_drafter_may_be_given_ready_made(llm):
    from foretell.drafters.ngram import NgramDrafter, NgramOptions

    given = LLM(llm.loaded, drafter=NgramDrafter(NgramOptions(min_n=1)), kv_tokens=256)
    assert given.generate("the the", PARAMS)[0].token_ids == llm.generate("the the", PARAMS)[0].token_ids
    with pytest.raises(InputError, match="drafter_options belong"):
        LLM(llm.loaded, drafter=NgramDrafter(NgramOptions()), drafter_options={"min_n": 2})


def test_loading_options_beside_a_loaded_model_are_refused(llm):
    for options in ({"device": "cpu"}, {"impl": "hf"}, {"allow_untested": True}):
        with pytest.raises(InputError, match="the model is loaded"):
            LLM(llm.loaded, **options)


def test_drafter_options_are_checked(llm):
    with pytest.raises(InputError, match="has no option 'window'") as caught:
        LLM(llm.loaded, drafter="ngram", drafter_options={"window": 3})
    assert "min_n" in str(caught.value.hint)
    with pytest.raises(InputError, match="max_n must be at least min_n"):
        LLM(llm.loaded, drafter="ngram", drafter_options={"min_n": 3, "max_n": 2})


@pytest.mark.parametrize("field", ["stop", "logit_bias"])
def test_parameters_do_not_change_with_what_they_were_made_from(field):
    made_from = {"stop": ["a"], "logit_bias": {1: 2.0}}[field]
    params = SamplingParams(**{field: made_from})
    made_from.clear()
    assert getattr(params, field)
