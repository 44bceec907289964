"""The engine on several ranks: the same text as on one, whoever drafts; and what happens when one is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foretell.api import LLM
from foretell.errors import InputError, RankError
from foretell.parallel.team import Team, identity
from foretell.types import SamplingParams
from tests import gguf_files

_random = random.Random(5)
LOOP = [7, 8, 9, 10, 11] * 9
PROMPTS = [LOOP, [_random.randrange(3, 60) for _ in range(83)], [5, 6, 7]]
DRAFTERS = {
    "none": {},
    "ngram": {"draft_tokens": 4},
    "suffix": {"draft_tokens": 6},
    "lookahead": {"draft_tokens": 20},
    "draft": {"draft_tokens": 3, "drafter_options": {"width": 2}},
    "self": {"draft_tokens": 4, "drafter_options": {"kv": "streaming", "budget": 16}},
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=14, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, seed=3),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    gguf_files.write(path)
    return str(path)


@pytest.fixture(scope="module")
def plain(path):
    return LLM(path, drafter="none", kv_tokens=600)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, path):
    llm = LLM(path, drafter="none", context_parallel=request.param, kv_tokens=200)
    yield llm
    team = llm.loaded.model.team
    del llm
    team.close()


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_one_process(plain, ranks, path, drafter, how):
    wanted = [c.token_ids for c in plain.generate(PROMPTS, PARAMS[how])]
    name = f"draft:{path}" if drafter == "draft" else drafter
    llm = LLM(ranks.loaded, drafter=name, kv_tokens=200, **DRAFTERS[drafter])
    for _ in range(2):  # the second time with prefix hits
        found = llm.generate(PROMPTS, PARAMS[how])
        assert [c.token_ids for c in found] == wanted
        llm.engine.cache.check_integrity()
    if drafter == "draft":
        assert llm.engine.stats.accepted > 20, "it drafts what it would say itself"
    if drafter == "suffix" and how == "greedy":
        assert llm.engine.stats.accepted > 20, "the second run repeats what the first one said"
    assert llm.engine.cache.reused > 0 or drafter == "self"


@pytest.mark.parametrize("kv", ["streaming", "snapkv", "h2o", "quest", "dustin"])
def test_a_selection_is_that_of_one_process(plain, ranks, path, kv):
    """The keys of the layer that is asked come from all ranks, so the selection is the global one."""
    given = {"drafter": f"draft:{path}" if kv == "dustin" else "none", "kv": kv, "kv_budget": 16}
    given |= {"draft_tokens": 3} if kv == "dustin" else {}
    one, many = LLM(plain.loaded, kv_tokens=600, **given), LLM(ranks.loaded, kv_tokens=200, **given)
    wanted, found = (llm.generate(PROMPTS, PARAMS["greedy"]) for llm in (one, many))
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert not found[0].lossless


def test_the_lossless_hierarchy_runs_over_ranks(plain, ranks):
    given = {"drafter": "none", "kv": "quest", "kv_budget": 16, "lossless": True, "draft_tokens": 4}
    wanted = plain.generate(PROMPTS, PARAMS["greedy"])
    found = LLM(ranks.loaded, kv_tokens=200, **given).generate(PROMPTS, PARAMS["greedy"])
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert all(c.lossless for c in found)


def test_speculation_changes_no_bit_within_a_number_of_ranks(ranks):
    """Rows are exact here too: log-probabilities with and without drafts are equal, not close."""
    params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2)
    answers = [
        LLM(ranks.loaded, drafter=name, kv_tokens=200, **DRAFTERS[name]).generate([LOOP], params)[0].logprobs
        for name in ("none", "ngram", "lookahead")
    ]
    assert answers[0] == answers[1] == answers[2]


def test_memory_of_a_rank_is_its_share_and_a_long_prompt_fits(path, ranks):
    size, own = ranks.loaded.model.ranks, ranks.engine.cache.arena
    assert own.slots == 200 * size
    assert own.keys_LKSD.shape[2] == 200
    alone = LLM(path, drafter="none", kv_tokens=200 * size).engine.cache.arena
    assert ranks.ranks is not None
    assert ranks.ranks["kv_bytes_per_rank"] * size == alone.keys_LKSD.nbytes + alone.values_LKSD.nbytes
    prompt = PROMPTS[1] * 2  # 166 tokens
    with pytest.raises(InputError, match="KV slots"):
        LLM(path, drafter="none", kv_tokens=100).generate([prompt], PARAMS["greedy"])
    llm = LLM(ranks.loaded, drafter="none", kv_tokens=100)
    assert len(llm.generate([prompt], PARAMS["greedy"])[0].token_ids) == 14


def test_scattered_rows_move_between_ranks(ranks):
    """A tree's accepted path is moved to where a chain would lie, whoever holds its rows."""
    arena = ranks.loaded.model.new_arena(40)
    store, size = arena.store.own, arena.grain
    held = torch.arange(0, 40, size)
    store.keys_LKSD[:, :, : len(held)] = held.view(1, 1, -1, 1).float()
    source = list(range(3 * size, 9 * size, 2))[:7]
    arena.move(source, size)
    for place, slot in enumerate(source):
        if (size + place) % size == 0 and slot % size == 0:
            assert (store.keys_LKSD[:, :, (size + place) // size] == slot).all()


def test_a_stream_may_be_left_early(ranks):
    llm = LLM(ranks.loaded, drafter="none", kv_tokens=200)
    with llm.stream(LOOP, PARAMS["greedy"]) as stream:
        next(stream)
    assert llm.engine.idle
    assert len(llm.generate([LOOP], PARAMS["greedy"])[0].token_ids) == 14


@pytest.mark.parametrize("sign", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_the_run_and_is_named(path, sign):
    """Killed or hanging: an error within the time-out, no process left behind."""
    code = f"""
import os, signal, sys, time
from foretell.api import LLM, SamplingParams
llm = LLM({path!r}, drafter="none", context_parallel=3, kv_tokens=200, rank_timeout=4.0)
children = [process.pid for process, _ in llm.loaded.model.team.children.values()]
print(*children, flush=True)
stream = llm.stream([5] * 60, SamplingParams(max_tokens=100, ignore_eos=True))
next(stream)
os.kill(children[1], signal.{sign})
start = time.monotonic()
try:
    for _ in stream: pass
except Exception as error:
    print(type(error).__name__, error, sep=": ", flush=True)
    print(time.monotonic() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    children, error, seconds = done.stdout.splitlines()
    assert error.startswith("RankError: rank 2 "), done.stderr
    assert ("signal 9" if sign == "SIGKILL" else "no sign of life") in error
    assert float(seconds) < 20
    for child in map(int, children.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_rank_that_takes_no_command_is_named(path):
    """It hangs between two commands: nothing that it should answer is under way."""
    code = f"""
import os, signal, time
from foretell.api import LLM
model = LLM({path!r}, drafter="none", context_parallel=2, kv_tokens=200, rank_timeout=4.0).loaded.model
os.kill(model.team.children[1][0].pid, signal.SIGSTOP)
start = time.monotonic()
try:
    for _ in range(3): model._channel.send(("drop", 99))
except Exception as error:
    print(type(error).__name__, error, sep=": ", flush=True)
    print(time.monotonic() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    error, seconds = done.stdout.splitlines()
    assert error.startswith("RankError: rank 1 gives no sign of life"), done.stderr
    assert float(seconds) < 20


def test_the_others_end_with_rank_0(path):
    code = f"""
import os
from foretell.api import LLM
llm = LLM({path!r}, drafter="none", context_parallel=2, kv_tokens=200)
print(next(iter(llm.loaded.model.team.children.values()))[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    child, deadline = int(done.stdout), time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, "rank 1 outlived rank 0"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_bad_numbers_of_ranks_are_refused(path, ranks):
    for bad in (0, -2, 513):
        with pytest.raises(InputError, match=f"context_parallel must be from 1 to 512, got {bad}"):
            LLM(path, context_parallel=bad)
    with pytest.raises(InputError, match="rank_timeout must be above 0 and finite, got 0"):
        LLM(path, context_parallel=2, rank_timeout=0)
    with pytest.raises(InputError, match="belongs to a group of ranks already"):
        LLM(path, context_parallel=2)


def test_differing_ranks_are_refused(plain, monkeypatch):
    """Versions, models and commands are compared by way of the store."""
    from torch._C._distributed_c10d import HashStore

    monkeypatch.setattr("foretell.parallel.team._HEARD", 0.0)
    store, own = HashStore(), identity(plain.loaded.model, ["generate", "Hello"])
    Team(1, 3, store).store.set("identity/1", '{"foretell": "0.0.1"}')
    store.set("identity/2", json.dumps(own))
    with pytest.raises(InputError, match="rank 1 differs from rank 0 in command: None"):
        Team(0, 3, store).compare(own)
    store.set("identity/1", json.dumps({**own, "foretell": "0.0.1"}))
    with pytest.raises(InputError, match=r"rank 1 differs from rank 0 in foretell: '0\.0\.1', not"):
        Team(0, 3, store).compare(own)
    store.set("identity/1", json.dumps({**own, "command": ["generate", "Bye"]}))
    with pytest.raises(InputError, match=r"in command: .*Bye.* not .*Hello"):
        Team(0, 3, store).compare(own)
    with pytest.raises(SystemExit):  # the others are silent
        Team(1, 3, store).compare({**own, "command": ["generate", "Bye"]})


def test_torchrun(path):
    """Rank 0 speaks, the others are silent; a number of ranks that does not fit is refused."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "foretell", "generate", "hello", "--raw", "--model", path, "--max-tokens", "5"]
    command += ["--drafter", "none", "--kv-tokens", "100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    alone = LLM(path, drafter="none").generate("hello", SamplingParams(max_tokens=5))[0]
    assert f'"token_ids": {alone.token_ids}' in done.stdout
    done = subprocess.run([*command, "--context-parallel", "3"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: context_parallel is 3, but torchrun started 2 ranks") == 1


def test_errors_have_their_own_type():
    assert issubclass(RankError, RuntimeError)
    assert not issubclass(RankError, InputError)


def test_the_rank_that_is_silent_lets_the_other_speak(monkeypatch):
    """torchrun ends all ranks when one has ended."""
    from foretell.parallel import team

    slept = []
    monkeypatch.setattr(team.time, "sleep", slept.append)
    assert isinstance(team._refusal(0, "what", "hint"), InputError)
    assert slept == []
    assert isinstance(team._refusal(1, "what", "hint"), SystemExit)
    assert slept == [team._HEARD]


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_every_process_of_a_machine_has_a_device_of_its_own(asked, monkeypatch):
    from foretell.models.load import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(asked) == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(asked) == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="process 2 on this machine, which has 2 CUDA devices"):
        pick_device(asked)
