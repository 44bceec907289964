"""`foretell bench run`: prompts of every form, an interrupted measurement, and the figures by hand."""

from __future__ import annotations

import json
import sys
import types

import pytest

from foretell.bench import adapt, peers, tasks
from foretell.bench import run as bench
from foretell.bench.items import Item
from foretell.bench.methods import Answer, Unavailable
from foretell.errors import InputError
from foretell.planner import CostTable
from foretell.stats import StepStats


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def test_prompts_of_every_form(tmp_path):
    spec = write(
        tmp_path / "spec.jsonl",
        [
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
            {"question_id": 200, "category": "math_reasoning", "turns": ["2 + 2?"]},
        ],
    )
    code = write(
        tmp_path / "human.jsonl",
        [{"task_id": "HumanEval/1", "prompt": "def f():", "entry_point": "f", "test": ""}],
    )
    own = write(
        tmp_path / "own.jsonl", [{"prompt": "Hello"}, {"prompt": "Bye", "task": "end", "max_tokens": 4}]
    )
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "b.txt").write_text("Dear B")
    (folder / "a.md").write_text("Dear A")
    (folder / "ignored.bin").write_text("x")
    found = [(p.task, p.id, p.text, p.raw) for p in tasks.load([spec, code, own, str(folder)])]
    assert found == [
        ("multi-turn", "81", "Write.", False),
        ("math-reasoning", "200", "2 + 2?", False),
        ("code", "HumanEval/1", "def f():", True),
        ("own", f"{tmp_path}/own.jsonl, line 1", "Hello", False),
        ("end", f"{tmp_path}/own.jsonl, line 2", "Bye", False),
        ("letters", "a", "Dear A", False),
        ("letters", "b", "Dear B", False),
    ]
    assert [p.task for p in tasks.load([spec, own, own], per_task=1)] == [
        "multi-turn",
        "math-reasoning",
        "own",
        "end",
    ]
    counts = [p.task for p in tasks.load(["identity"])]
    assert len(counts) == len({p.id for p in tasks.load(["identity"])}), "second turns are the same prompt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2: not an object"),
        ('{"question": "a"}', "line 1: no prompt in it"),
        ('{"turns": []}', "line 1: no prompt in it"),
    ],
)
def test_bad_files_are_named_by_line(content, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        tasks.load([str(path)])


def test_bad_sources(tmp_path):
    with pytest.raises(InputError, match="no prompts at"):
        tasks.load(["nowhere"])
    with pytest.raises(InputError, match="holds no"):
        tasks.load([str(tmp_path)])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Fake:
    """A method that takes a given time and says given ids; may be interrupted."""

    reference = "plain"
    batches = samples = True

    def __init__(self, name, clock, seconds, ids, stop_at=None):
        self.name, self._clock, self._seconds, self._ids = name, clock, seconds, ids
        self._left = stop_at
        self.calls = 0

    def begin(self):
        self.sessions = getattr(self, "sessions", 0) + 1

    def answer(self, items, params):
        self.calls += 1
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        self._clock.now += self._seconds
        stats = StepStats(
            steps=2, drafts=2, drafted=6, accepted=2, emitted=4, accepted_at=[1, 1], proposed_at=[2, 1]
        )
        return [Answer(list(self._ids), 0.5, [0.1, 0.3, 0.2], stats) for _ in items]


ITEMS = [Item(f"{task}{i}", task, [1, 2], 4) for task in ("a", "b") for i in range(3)]
SETTINGS = bench.Settings((1, 2), (0.0,), 2)


def measured(path, methods, clock):
    log = bench.Log(path, {"what": "test"})
    bench.measure(methods, ITEMS, SETTINGS, log, clock, lambda: None)
    return log


def test_figures_by_hand(tmp_path):
    clock = Clock()
    methods = [Fake("plain", clock, 2.0, [7, 7, 7, 7]), Fake("auto", clock, 1.0, [7, 7, 7, 7])]
    rows = bench.summarise(measured(tmp_path / "run.jsonl", methods, clock))
    assert methods[1].sessions == 4, "two batch sizes, two repetitions: each begins knowing nothing"
    (auto,) = [r for r in rows if (r["method"], r["task"], r["batch"]) == ("auto", "overall", 1)]
    assert auto["tokens_per_s"] == 4.0
    assert auto["ratio_to_plain"] == 2.0
    assert auto["al"] == 2.0
    assert auto["tokens_per_step"] == 2.0
    assert auto["overhead_c"] == 0.0
    assert auto["lossless"] is True
    assert auto["identical"] == [12, 12]
    assert auto["decode_tokens_per_s"] == 6.0, "three tokens behind the first one, in half a second"
    assert auto["decode_ratio"] == 3.0, "plain takes 1.5 s for them"
    assert (auto["ttft_s"], auto["itl_ms"], auto["itl_p99_ms"]) == (0.5, 200.0, 300.0)
    assert auto["marginal_acceptance"] == [0.5, 0.5]
    (pair,) = [r for r in rows if (r["method"], r["task"], r["batch"]) == ("plain", "a", 2)]
    assert pair["tokens_per_s"] == pytest.approx(3 * 4 / 4.0), "two batches for three prompts"


def test_ratios_are_to_the_same_weights(tmp_path):
    clock = Clock()
    methods = [
        Fake(f"{m} {w}", clock, s, [i])
        for i, (m, w, s) in enumerate(
            [("plain", "fp32", 8.0), ("plain", "int8", 4.0), ("auto", "int8", 2.0), ("llama.cpp", "", 1.0)]
        )
    ]
    for method in methods:
        method.reference = f"plain {method.name.split()[1]}" if " " in method.name.strip() else "llama.cpp"
        method.name = method.name.strip()
    rows = {r["method"]: r for r in bench.summarise(measured(tmp_path / "run.jsonl", methods, clock))}
    assert {name: row["ratio_to_plain"] for name, row in rows.items()} == {
        "plain fp32": 1,
        "plain int8": 1,
        "auto int8": 2,
        "llama.cpp": 8,
    }
    assert {name: row["lossless"] for name, row in rows.items()} == {
        "plain fp32": True,
        "plain int8": True,
        "auto int8": False,
        "llama.cpp": True,
    }


def test_a_difference_is_shown(tmp_path):
    clock = Clock()
    methods = [Fake("plain", clock, 1.0, [7, 7]), Fake("auto", clock, 1.0, [7, 8])]
    rows = bench.summarise(measured(tmp_path / "run.jsonl", methods, clock))
    assert {r["lossless"] for r in rows if r["method"] == "auto"} == {False}


def test_an_interrupted_measurement_goes_on(tmp_path):
    clock, path = Clock(), tmp_path / "run.jsonl"
    stopped = [Fake("plain", clock, 1.0, [7], stop_at=5), Fake("auto", clock, 1.0, [7])]
    with pytest.raises(KeyboardInterrupt):
        measured(path, stopped, clock)
    path.write_text(path.read_text()[:-20])  # the machine went down while a line was written
    kept = len(path.read_text().splitlines()) - 2
    assert kept > 5
    again = [Fake("plain", clock, 1.0, [7]), Fake("auto", clock, 1.0, [7])]
    log = measured(path, again, clock)
    total = len(list(bench.cells(again, ITEMS, SETTINGS)))
    assert len(log.cells) == total
    assert sum(m.calls for m in again) == total - kept + 2, "what was measured is not measured again"
    with pytest.raises(InputError, match="another measurement"):
        bench.Log(path, {"what": "other"})


def test_a_cut_line_costs_one_cell_and_no_more(tmp_path):
    path = tmp_path / "log.jsonl"
    log = bench.Log(path, {"a": 1})
    log.append({"key": "first"})
    with path.open("a") as file:
        file.write('{"key": "cu')
    bench.Log(path, {"a": 1}).append({"key": "second"})
    assert set(bench.Log(path, {"a": 1}).cells) == {"first", "second"}


def test_a_method_that_turns_out_not_to_work_is_left_out(tmp_path):
    class Broken(Fake):
        def answer(self, items, params):
            super().answer(items, params)
            raise Unavailable("no such instruction")

    clock = Clock()
    methods = [Fake("plain", clock, 1.0, [7]), Broken("peer", clock, 1.0, [7])]
    log = bench.Log(tmp_path / "run.jsonl", {})
    assert bench.measure(methods, ITEMS, SETTINGS, log, clock, lambda: None) == {
        "peer": "no such instruction"
    }
    assert methods[1].calls == 1
    assert {row["method"] for row in bench.summarise(log)} == {"plain"}


def test_peers_are_measured_alone_and_greedily():
    class Peer(Fake):
        batches = samples = False

    clock = Clock()
    methods = [Fake("plain", clock, 1.0, [7]), Peer("llama.cpp", clock, 1.0, [7])]
    found = bench.cells(methods, ITEMS, bench.Settings((1, 2), (0.0, 0.8), 1))
    assert {(c.batch, c.temperature) for c, _ in found if c.method == "llama.cpp"} == {(1, 0.0)}


def given_peers(tmp_path, **more):
    loaded = types.SimpleNamespace(folder=tmp_path, end_ids=frozenset({2}), tokenizer=None)
    return peers.Given(loaded, 100, **more)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama.cpp", "--gguf PATH"),
        ("llama.cpp:draft", "--gguf PATH"),
        ("openvino:pld", "--gguf PATH"),
        ("transformers", "."),
        ("transformers:assistant", "."),
        ("vllm", "vllm is not installed"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name, message, tmp_path, monkeypatch):
    for package in ("xllamacpp", "openvino_genai"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda package: package != "vllm" or None)
    with pytest.raises(Unavailable, match=message):
        peers.build(name, given_peers(tmp_path), lambda spec: pytest.fail("it is a peer"))


def test_an_unknown_mode_of_a_peer(tmp_path):
    with pytest.raises(InputError, match="has no mode 'magic'"):
        peers.build("llama.cpp:magic", given_peers(tmp_path), lambda spec: None)
    assert peers.build("draft:model", given_peers(tmp_path), lambda spec: [spec]) == ["draft:model"]


def test_arrivals_become_gaps():
    answer = Answer.timed([7, 8, 9], 1.0, [(1.5, 2), (2.5, 2), (2.6, -1)])
    assert (answer.first_s, answer.first, answer.gaps_s, answer.count) == (0.5, 2, [0.5, 0.5], 3)


def test_how_long_the_planner_took_by_hand():
    """A row more costs a tenth of a plain step. Ten steps at 12 rows after the change, then none."""
    cost = CostTable({1: 1.0, 11: 2.0})
    steps = [adapt.Step("edits", 10, 9, 10)] * 20 + [adapt.Step("free text", 10, 0, 1)] * 10
    steps += [adapt.Step("free text", 0, 0, 1)] * 30
    assert steps[0].speed(cost) == 5.0
    assert steps[20].speed(cost) == 0.5
    assert adapt.switch_of(steps) == 20
    means = adapt.running(steps, cost)
    assert means[:20] == [5.0] * 20, "nothing from beyond the change"
    assert means[20:32] == pytest.approx([0.5 + 0.05 * n for n in range(10)] + [1.0, 1.0])
    assert adapt.steps_to_adapt(steps, cost) == 10
