"""Who runs and who waits: growing, giving way, passing, sharing a step; and that no text notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters import build_drafter
from foretell.drafters.base import DrafterContext
from foretell.engine import scheduler
from foretell.types import NO_NEEDS, SamplingParams
from tests import head_files, oracle

ENDS: frozenset[int] = frozenset()
LONG = [(i * i + 3) % 90 + 3 for i in range(70)]
PARAMS = {
    "greedy": SamplingParams(max_tokens=60),
    "seeded": SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, seed=7),
    "penalised": SamplingParams(
        max_tokens=60, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=5, seed=9
    ),
}


@pytest.fixture
def eager(monkeypatch):
    """Slots are reserved four tokens at a time, and patience is short: everybody gives way all the time."""
    monkeypatch.setattr(scheduler, "_AHEAD", 4)
    monkeypatch.setattr(scheduler, "_PATIENCE", 6)


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


@pytest.fixture(scope="module")
def make(target, decoder, tmp_path_factory):
    """A new drafter of every family that keeps something per request."""
    root = tmp_path_factory.mktemp("heads")
    folders = head_files.every_kind(root)
    other = decoder("llama", **{**head_files.TARGET, "num_hidden_layers": 1})

    def build(case: str):
        if case == "draft":
            return oracle.draft_model(other, target)
        if case == "perfect draft":
            return oracle.draft_model(target, target)
        name, _, options = case.partition(" ")
        spec = f"{name}:{folders[name]}" if name in folders else name
        given = dict(item.split("=") for item in options.split())
        context = DrafterContext(target, None, 512)
        return build_drafter(spec, given, context)

    return build


CASES = [
    "none",
    "ngram min_n=1",
    "suffix",
    "lookahead",
    "draft",
    "perfect draft",
    "medusa",
    "eagle",
    "eagle3",
    "mtp",
    "self kv=snapkv budget=8",
    "self kv=dustin budget=8",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", PARAMS)
def test_a_request_that_was_put_back_says_the_same(case, setting, eager, make, target):
    """An arena in which four requests start and two can end."""
    params = PARAMS[setting]
    wanted = [oracle.generate(target, p, params, ENDS) for p in oracle.PROMPTS]
    engine = oracle.engine(target, make(case), draft_tokens=5, kv_slots=160, prefill_chunk=16)
    requests = oracle.run(engine, oracle.PROMPTS, params, ENDS)
    assert [r.output_ids for r in requests] == wanted
    assert sum(r.stats.preempted for r in requests) == engine.stats.preempted > 0
    assert all(r.stats.emitted == len(r.output_ids) == len(r.origins) for r in requests)
    assert not engine.cache._live


def test_log_probabilities_and_streams_survive(eager, target):
    """What was handed out stays; nothing is said twice, nothing is left out."""
    params = SamplingParams(max_tokens=60, logprobs=2)
    roomy = oracle.engine(target, "ngram", options={"min_n": 1})
    wanted = [r.logprobs for r in oracle.run(roomy, oracle.PROMPTS, params)]
    engine = oracle.engine(target, "ngram", options={"min_n": 1}, kv_slots=160)
    requests = [engine.submit(p, params, ENDS) for p in oracle.PROMPTS]
    heard: dict[int, list[int]] = {r.id: [] for r in requests}
    while not engine.idle:
        engine.step()
        for request in requests:
            if request.has_news:
                heard[request.id] += request.take().token_ids
    assert engine.stats.preempted > 0
    assert [heard[r.id] for r in requests] == [r.output_ids for r in requests]
    assert [r.logprobs for r in requests] == wanted


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(90, 300),
    ahead=st.integers(1, 40),
    patience=st.integers(1, 30),
    chunk=st.integers(1, 40),
    batch=st.integers(1, 5),
    draft=st.integers(0, 9),
    limits=st.lists(st.integers(1, 60), min_size=5, max_size=5),
)
def test_any_schedule_says_the_same(seed, slots, ahead, patience, chunk, batch, draft, limits, target):
    """Random sizes of everything, adversarial drafts; the accounting is checked after every step."""
    prompts = [*oracle.PROMPTS, LONG[:20]]
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3)
    wanted = _once(target, prompts, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_AHEAD", ahead)
        patch.setattr(scheduler, "_PATIENCE", patience)
        drafter = oracle.Fortune({}, 96, seed)
        engine = oracle.engine(
            target, drafter, draft_tokens=draft, kv_slots=slots, prefill_chunk=chunk, max_batch=batch
        )
        drafter._tree = lambda request, budget: _truth(wanted, request, budget, drafter._random)
        each = [params.replace(max_tokens=limit) for limit in limits]
        requests = oracle.run(engine, prompts, each)
    for request, limit in zip(requests, limits, strict=True):
        assert request.output_ids == wanted[tuple(request.tokens[: request.prompt_length])][:limit]


_known: dict[tuple[int, ...], list[int]] = {}


def _once(target, prompts, params):
    for prompt in prompts:
        if tuple(prompt) not in _known:
            _known[tuple(prompt)] = oracle.generate(target, prompt, params)
    return _known


def _truth(wanted, request, budget, pick):
    """A right beginning of a random length, then a wrong token."""
    from foretell.types import chain

    prompt = tuple(request.tokens[: request.prompt_length])
    right = wanted[prompt][request.emitted :][: pick.randint(0, budget)]
    return chain([*right, pick.randrange(96)][:budget])


def test_slots_are_reserved_as_they_are_needed(target):
    """1,000 tokens may come; 256 and what the draft takes are reserved, and grow."""
    target = _long(target)
    engine = oracle.engine(target, kv_slots=4096)
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=600), ENDS)
    engine.step()
    assert request.lease.capacity == 3 + 5 + 1 + 256
    while request.emitted < 300:
        engine.step()
    assert 300 < request.lease.capacity <= 3 + 300 + 5 + 1 + 256
    while not engine.idle:
        engine.step()
    assert request.stats.preempted == 0


def _long(target):
    """The same model, with a longer context than its checkpoint says."""

    class Longer:
        max_context = 2048

        def __getattr__(self, name):
            return getattr(target, name)

    return Longer()


def test_where_text_may_depend_on_it_everything_is_reserved(target):
    for engine in (
        oracle.engine(target, "ngram", rule="rejection"),
        oracle.engine(target, "none", kv="snapkv", kv_budget=8),
    ):
        request = engine.submit(LONG, SamplingParams(max_tokens=150), ENDS)
        engine.step()
        assert request.lease.capacity == request.capacity == 70 + 150 + 5


def test_a_request_in_the_way_of_growth_makes_room_by_moving(eager, target):
    engine = oracle.engine(target, kv_slots=128)
    first = engine.submit([5, 6, 7], SamplingParams(max_tokens=60), ENDS)
    second = engine.submit([8, 9], SamplingParams(max_tokens=40), ENDS)
    engine.step()
    begin = first.lease.start, second.lease.start
    while first.finish_reason is None:
        engine.step()
        engine.cache.check_integrity()
    assert engine.stats.preempted == 0
    assert (first.lease, begin[0]) == (None, 0)
    assert first.output_ids == oracle.generate(target, [5, 6, 7], SamplingParams(max_tokens=60))


def test_small_ones_pass_a_large_one_only_so_often(target):
    """A stream of small requests; the large one needs the whole arena."""
    engine = oracle.engine(target, kv_slots=110, max_batch=4, rule="rejection")
    small = SamplingParams(max_tokens=12)
    running = [engine.submit([9, i + 3], small, ENDS) for i in range(3)]
    engine.step()
    large = engine.submit(LONG, SamplingParams(max_tokens=30), ENDS)
    later = []
    while large.lease is None:
        if len(engine.waiting) < 3:
            later.append(engine.submit([9, len(later) + 7], small, ENDS))
        engine.step()
    passed = [r for r in later if r.stats.steps or r.lease is not None]
    assert running[0].finish_reason == "length"
    assert len(passed) == large.passed == scheduler._PASSES


def test_who_waits_too_long_takes_the_slots_of_the_last(target, monkeypatch):
    """The last in turn makes way once, goes to the end of the queue, and ends with the same text."""
    monkeypatch.setattr(scheduler, "_PATIENCE", 10)
    monkeypatch.setattr(scheduler, "_AHEAD", 60)
    params = SamplingParams(max_tokens=60)
    engine = oracle.engine(target, kv_slots=156)
    running = [engine.submit([9, i + 3], params, ENDS) for i in range(2)]
    engine.step()
    waiting = engine.submit(LONG, SamplingParams(max_tokens=10), ENDS)
    steps = 0
    while waiting.lease is None:
        engine.step()
        steps += 1
    assert steps == 12, "ten steps of patience, one to make way, one to be admitted"
    assert [r.stats.preempted for r in running] == [0, 1]
    assert engine.waiting == [running[1]]
    while not engine.idle:
        engine.step()
    for request in (*running, waiting):
        prompt = request.tokens[: request.prompt_length]
        assert request.output_ids == oracle.generate(target, prompt, request.params)
    assert [r.stats.preempted for r in running] == [0, 1], "once is enough"


def test_a_long_prompt_is_read_beside_streams_in_small_pieces(target):
    engine = oracle.engine(target, prefill_chunk=32)
    stream = engine.submit([9, 4], SamplingParams(max_tokens=40), ENDS)
    engine.step()
    long = engine.submit(LONG, SamplingParams(max_tokens=4), ENDS)
    read = []
    while long.emitted == 0:
        before = stream.emitted
        engine.step()
        read.append(engine.last.prompt_rows)
        assert stream.emitted > before, "the stream goes on in every step"
    assert read == [8] * 8 + [6]


def test_prompts_share_a_step_in_turn(target):
    engine = oracle.engine(target, prefill_chunk=64)
    prompts = [[(i * k) % 90 + 3 for i in range(40)] for k in (1, 7, 11)]
    requests = [engine.submit(p, SamplingParams(max_tokens=2), ENDS) for p in prompts]
    engine.step()
    assert [r.lease.length for r in requests] == [40, 24, 0]
    engine.step()
    assert engine.last.prompt_rows == 16, "a quarter, now that somebody answers"
    assert [r.lease.length for r in requests[1:]] == [40, 0]
    while not engine.idle:
        engine.step()
    assert [r.output_ids for r in requests] == [
        oracle.generate(target, p, SamplingParams(max_tokens=2)) for p in prompts
    ]


def test_the_same_prompt_is_read_once(target):
    """n answers, or a shared system prompt: the others wait a step and find it."""
    engine = oracle.engine(target)
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=1)
    requests = [engine.submit([*LONG, 5 + i], params, ENDS) for i in range(3)]
    requests.append(engine.submit(LONG, params, ENDS, answer=1))
    rows = 0
    while not engine.idle:
        engine.step()
        rows += engine.last.prompt_rows
    assert rows == 71
    assert [r.stats.reused for r in requests] == [0, 70, 70, 69]
    alone = oracle.run(oracle.engine(target), [[*LONG, 5 + i] for i in range(3)], params)
    assert [r.output_ids for r in requests[:3]] == [r.output_ids for r in alone]


def test_a_finished_chat_turn_serves_the_next_one(target):
    engine = oracle.engine(target)
    (first,) = oracle.run(engine, [LONG], SamplingParams(max_tokens=10))
    (second,) = oracle.run(engine, [[*first.tokens, 5, 6, 7]], SamplingParams(max_tokens=5))
    assert second.stats.reused == 70 + 10 - 1, "all but the last token, which nobody has read"
    assert second.output_ids == oracle.generate(
        target, [*first.tokens, 5, 6, 7], SamplingParams(max_tokens=5)
    )


class _Faulty:
    """A drafter that fails at one request, in one of its methods."""

    needs, expects, draft_tokens = NO_NEEDS, 0.0, 4

    def __init__(self, method: str, prompt: list[int], after: int) -> None:
        self._inner = oracle.Fortune({}, 96, 1)
        self._inner._tree = lambda request, budget: _truth(_known, request, budget, self._inner._random)
        self._method, self._prompt, self._after = method, prompt, after

    def _check(self, method, request):
        guilty = request.tokens[: len(self._prompt)] == self._prompt
        if method == self._method and guilty and request.emitted >= self._after:
            raise RuntimeError(f"{method} failed")

    def start(self, request):
        self._check("start", request)
        self._inner.start(request)

    def propose(self, requests, plans):
        for request in requests:
            self._check("propose", request)
        return self._inner.propose(requests, plans)

    def observe(self, request, seen):
        self._check("observe", request)
        self._inner.observe(request, seen)

    def finish(self, request):
        self._check("finish", request)
        self._inner.finish(request)

    def forget(self): ...


def _step(engine) -> Exception | None:
    """A step's error, if it had one."""
    try:
        engine.step()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("method", "alone"), [("start", True), ("observe", True), ("propose", False)])
def test_a_failure_ends_those_that_it_concerns(method, alone, target):
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3)
    wanted = _once(target, oracle.PROMPTS, params)
    drafter = _Faulty(method, oracle.PROMPTS[1], after=0 if method == "start" else 5)
    engine = oracle.engine(target, drafter)
    requests = [engine.submit(p, params, ENDS) for p in oracle.PROMPTS]
    failed = 0
    while not engine.idle:
        error = _step(engine)
        if error is not None:
            assert str(error) == f"{method} failed"
            assert error in engine.failures
            failed += 1
        engine.cache.check_integrity()
    assert failed == 1
    errors = [r.error is not None for r in requests]
    assert errors == ([False, True, False, False] if alone else [True] * 4)
    assert [r.finish_reason for r in requests] == ["error" if e else "length" for e in errors]
    for request, prompt in zip(requests, oracle.PROMPTS, strict=True):
        assert request.output_ids == wanted[tuple(prompt)][: request.emitted]
    (after,) = oracle.run(engine, [oracle.PROMPTS[0]], params)
    assert after.output_ids == wanted[tuple(oracle.PROMPTS[0])], "the engine goes on"
    assert not engine.cache._live


def test_a_drafter_that_cannot_let_go_costs_no_answer(target, caplog):
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3)
    wanted = _once(target, oracle.PROMPTS, params)
    engine = oracle.engine(target, _Faulty("finish", oracle.PROMPTS[1], after=0))
    requests = oracle.run(engine, oracle.PROMPTS, params)
    assert [r.output_ids for r in requests] == [wanted[tuple(p)] for p in oracle.PROMPTS]
    assert "could not let go of request 1" in caplog.text


def test_logits_that_are_not_finite_end_their_own_request(target):
    class Broken:
        def __getattr__(self, name):
            return getattr(target, name)

        def forward(self, batch, needs=NO_NEEDS):
            output = target.forward(batch, needs)
            if len(output.logits_RV) == 4:
                logits_RV = output.logits_RV.clone()
                logits_RV[1] = torch.nan
                return replace(output, logits_RV=logits_RV)
            return output

    engine = oracle.engine(Broken(), "none")
    requests = [engine.submit(p, SamplingParams(max_tokens=8), ENDS) for p in oracle.PROMPTS]
    errors = []
    while not engine.idle:
        errors.append(_step(engine))
    assert [type(error) for error in errors if error is not None] == [FloatingPointError]
    assert [r.finish_reason for r in requests] == ["length", "error", "length", "length"]


def test_a_failing_target_ends_the_step_and_no_more(target):
    class Broken:
        fail = False

        def __getattr__(self, name):
            return getattr(target, name)

        def forward(self, batch, needs=NO_NEEDS):
            if self.fail:
                raise MemoryError("no memory")
            return target.forward(batch, needs)

    model = Broken()
    engine = oracle.engine(model, "ngram", max_batch=2)
    requests = [engine.submit(p, SamplingParams(max_tokens=8), ENDS) for p in oracle.PROMPTS]
    engine.step()
    model.fail = True
    with pytest.raises(MemoryError):
        engine.step()
    model.fail = False
    while not engine.idle:
        engine.step()
    assert [r.finish_reason for r in requests] == ["error", "error", "length", "length"]
    engine.cache.check_integrity()
