"""`foretell bench serve`: what is counted, and against what."""

from __future__ import annotations

import pytest

from foretell.api import LLM
from foretell.bench.items import Item
from foretell.bench.methods import Unavailable
from foretell.bench.serve import (
    PLAIN,
    Sequential,
    Served,
    Streams,
    markdown,
    measure,
    mixed,
    process,
    summarise,
)
from tests import gguf_files
from tests.serving import serving


class Fixed:
    """Answers as it is told."""

    def __init__(self, name: str, exact: bool, *groups: list[Served]) -> None:
        self.name, self.exact, self._groups = name, exact, list(groups)

    def answer(self, items):
        return [Served("", 1, False, 0, 1)] if items[0].id == "warm" else self._groups.pop(0)


def items(count: int, longest: int = 8) -> list[Item]:
    return [Item(str(n), "t", [5 + n, 6, 7], longest) for n in range(count)]


def test_rows():
    plain = Fixed(
        PLAIN,
        True,
        [Served("a", 4, False, 1.0, 2.0), Served("b", 4, True, 3.0, 4.0)],
        [Served("c", 2, False, 1.0, 1.0)],
    )
    other = Fixed(
        "s",
        True,
        [Served("a", 4, False, 0.5, 1.0), Served("x", 4, False, 0.5, 1.5)],
        [Served("c", 2, False, 0.2, 1.0)],
    )
    foreign = Fixed("f", False, [Served("?", 4, False, 1.0, 5.0)] * 2, [Served("?", 2, False, 1.0, 5.0)])
    cells = []
    found = measure([plain, other, foreign], items(3), 2, lambda: cells.append(1))
    first, second, third = summarise([plain, other, foreign], found)
    assert len(cells) == 6
    assert (first["tokens_per_s"], first["ratio_to_plain"], first["lossless"]) == (2.0, 1.0, True)
    assert (second["tokens_per_s"], second["ratio_to_plain"]) == (4.0, 2.0)
    assert (second["lossless"], second["identical"]) == (False, [2, 3])
    assert (second["ttft_p50_s"], second["ttft_p95_s"]) == (0.5, 0.5)
    assert (third["tokens_per_s"], third["lossless"]) == (1.0, None)
    assert (first["ended"], second["ended"]) == (1, 0)
    assert "| s | 10 | 0 | 4 | 2 | 0.5 | 0.5 | NO |" in markdown([second], {"model": "m"})


def test_answers_get_mixed_lengths():
    assert [item.max_tokens for item in mixed(items(5, 100))] == [25, 100, 50, 75, 25]
    assert mixed(items(1, 1))[0].max_tokens == 1


def test_a_server_against_one_by_one(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    gguf_files.write(path)
    llm = LLM(path, drafter="none")
    asked = mixed(items(6, 20))
    with serving(lambda: LLM(llm.loaded, drafter="suffix", draft_tokens=3)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        contenders = [Sequential(llm), Streams("served", (host, int(port)), server.model, {})]
        found = measure(contenders, asked, 4, lambda: None)
        plain, served = summarise(contenders, found)
        with pytest.raises(RuntimeError, match="status 404"):
            Streams("x", (host, int(port)), "other", {}).answer(asked[:1])
    assert plain["ended"] == served["ended"]
    assert 0 < plain["tokens"] == served["tokens"] <= sum(item.max_tokens for item in asked)
    assert served["identical"] == [6, 6]
    assert 0 < served["ttft_p50_s"] <= served["ttft_p95_s"]


def test_a_process_that_ends_is_unavailable():
    with (
        pytest.raises(Unavailable, match="no-such-model"),
        process("foretell", "serve", "-m", "no-such-model"),
    ):
        pass
