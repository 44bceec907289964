"""Tasks of the quality suite: lengths, places, references; LongBench's metrics by hand, its files by line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.bench.longcontext import corpus, longbench, needles, ruler
from foretell.bench.longcontext.metrics import score
from foretell.bench.longcontext.questions import fit
from foretell.bench.longcontext.run import DEFAULT_TASKS, PERPLEXITY, TASKS, Settings, passages, questions
from foretell.errors import InputError


class Words:
    """A tokenizer of words, white space and signs that gives the text back."""

    chat_template = None

    def __init__(self):
        self._ids, self._texts = {}, []

    def encode(self, text, *, special=True):
        parts = re.findall(r"\w+|\s+|[^\w\s]", text)
        for part in parts:
            if part not in self._ids:
                self._ids[part] = len(self._texts)
                self._texts.append(part)
        return [self._ids[part] for part in parts]

    def decode(self, ids):
        return "".join(self._texts[token] for token in ids)


@pytest.fixture
def words():
    return Words()


@pytest.mark.parametrize("task", [task for task in TASKS if task != PERPLEXITY])
def test_prompts_have_their_length_and_hold_their_answers(task, words):
    settings = Settings((2500,), 3, 2, 8, (task,))
    asked = questions(settings, words)
    assert len(asked) == (6 if task == "needle" else 2)
    assert len({q.id for q in asked}) == len(asked)
    for question in asked:
        text = words.decode(question.ids)
        room = 2500 - question.max_tokens
        slack = 140 if task == "needle" else 60  # a piece is a sentence, or three more words in a list
        assert room - slack < len(question.ids) <= room
        assert all(reference in text for reference in question.references)
    again = questions(settings, words)
    assert [q.ids for q in again] == [q.ids for q in asked]
    other = questions(Settings((2500,), 3, 2, 8, (task,), seed=1), words)
    assert [q.ids for q in other] != [q.ids for q in asked]
    assert asked[0].ids != asked[1].ids


def test_needles_lie_at_their_depth_behind_a_sentence(words):
    for question in needles.needle_grid(words, corpus.books(None)[0], 2500, 5, 0, 1):
        text = words.decode(question.ids)
        body = text.partition("\n")[2].rpartition("\nWhat is")[0]
        at = body.index(f"The secret number of {text.rpartition('number of ')[2].removesuffix(' is')}")
        assert at == 0 or body[at - 2] in ".!?" or body[at - 2 :].startswith('" ')
        assert abs(at / len(body) - question.depth) < 0.06


@given(st.integers(0, 40), st.floats(0, 1))
def test_insertion_keeps_the_text(sentences, depth):
    text = " ".join(f"Sentence {i} is here." for i in range(sentences))
    whole = needles.insert(text, "NEEDLE.", depth)
    assert whole.replace("NEEDLE.", "").split() == text.split()
    before = whole.partition("NEEDLE.")[0]
    assert len(before.strip()) <= depth * len(text) + 1
    assert depth * len(text) - len(before) <= len("Sentence 10 is here. ")


def test_the_longest_prompt_that_fits(words):
    def build(pieces):
        return "a " * pieces

    for room in (2, 3, 9, 200):
        ids, pieces = fit(build, room, words, "task")
        assert len(ids) <= room < len(words.encode("a " * (pieces + 1)))
    assert fit(build, 200, words, "task", most=5)[1] == 5
    with pytest.raises(InputError, match="task does not fit 1 tokens"):
        fit(build, 1, words, "task")


def test_rules_of_ruler(words):
    """Four hops; ten words thirty times and others three times; frequencies that fall with the rank."""
    (question,) = needles.draw_questions("v", *ruler.TASKS["variables"], words, 2500, 0, 1)
    text = words.decode(question.ids)
    chain = re.findall(r"VAR (\w{5}) = (?:VAR (\w{5})|\d{5})\.", text)
    assert len(chain) == 5
    assert [old for _, old in chain[1:]] == [new for new, _ in chain[:-1]]
    assert tuple(new for new, _ in chain) == question.references
    (question,) = needles.draw_questions("c", *ruler.TASKS["common-words"], words, 2500, 0, 1)
    listed = re.findall(r"\d+\. ([a-z]+)", words.decode(question.ids).rpartition("\nQuestion")[0])
    counts = {word: listed.count(word) for word in listed}
    assert {counts[word] for word in question.references} == {30}
    assert {count for word, count in counts.items() if word not in question.references} == {3}
    (question,) = needles.draw_questions("f", *ruler.TASKS["frequent-words"], words, 2500, 0, 1)
    body = words.decode(question.ids).partition("\n")[2].partition("\n")[0].split()
    counts = {word: body.count(word) for word in body}
    ranked = sorted(counts, key=lambda word: -counts[word])
    assert ranked[:4] == ["...", *question.references]
    assert counts["..."] / counts[question.references[0]] == pytest.approx(4, rel=0.05)
    assert counts["..."] / counts[question.references[1]] == pytest.approx(9, rel=0.05)


def test_several_values_and_keys(words):
    (question,) = needles.draw_questions("m", *needles.TASKS["niah-multivalue"], words, 2500, 0, 1)
    text = words.decode(question.ids)
    assert len(set(question.references)) == 4
    assert len(set(re.findall(r"The secret number of ([\w-]+) is", text))) == 1
    (question,) = needles.draw_questions("m", *needles.TASKS["niah-multiquery"], words, 2500, 0, 1)
    pairs = dict(re.findall(r"The secret number of ([\w-]+) is (\d+)\.", words.decode(question.ids)))
    asked = words.decode(question.ids).rpartition("numbers of ")[2].partition(" in the")[0].split(", ")
    assert [pairs[key] for key in asked] == list(question.references)
    (question,) = needles.draw_questions("k", *needles.TASKS["niah-multikey"], words, 2500, 0, 1)
    pairs = dict(re.findall(r"The secret number of ([\w-]+) is (\d+)\.", words.decode(question.ids)))
    key = words.decode(question.ids).rpartition("number of ")[2].removesuffix(" is")
    assert (pairs[key],) == question.references
    assert len(pairs) > 50
    (question,) = needles.draw_questions("kv", *needles.TASKS["kv"], words, 2500, 0, 1)
    *lines, _, last = words.decode(question.ids).split("\n")
    assert f"{last} {question.references[0]}" in lines


def test_passages_are_read_and_scored_whole(words, tmp_path):
    (tmp_path / "a.txt").write_text("one two three. " * 200)
    settings = Settings((400, 500), 1, 1, 16, (PERPLEXITY,), books=tmp_path)
    found = passages(settings, words)
    assert [(p.id, len(p.ids), len(p.text)) for p in found] == [
        ("perplexity 400 a", 382, 17),
        ("perplexity 500 a", 482, 17),
    ]
    assert words.decode([*found[0].ids, *found[0].text]) == words.decode(
        words.encode("one two three. " * 200)[:399]
    )
    assert passages(Settings((400,), 1, 1, 16, ("kv",)), words) == []
    with pytest.raises(InputError, match="the book a has 1400 tokens, 2000 are wanted"):
        passages(Settings((2000,), 1, 1, 16, (PERPLEXITY,), books=tmp_path), words)
    (tmp_path / "a.txt").write_text("  ")
    with pytest.raises(InputError, match=r"holds no \.txt file"):
        corpus.books(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match=r"a\.txt cannot be read"):
        corpus.books(tmp_path)
    assert set(DEFAULT_TASKS) <= set(TASKS)


@pytest.mark.parametrize(
    ("metric", "answer", "references", "wanted"),
    [
        ("recall", "It is 12 and ABC.", ["12", "abc", "7"], 2 / 3),
        ("f1", "The cat, sat!", ["a cat sat down"], 2 * 2 / (2 + 3)),
        ("f1", "dog", ["cat", "The dog"], 1.0),
        ("f1", "the", ["cat"], 0.0),
        ("f1", "no no yes", ["no yes yes"], 2 * 2 / 6),
        # words in common in order: "a c d" of the sets {a b c d} and {a c x d}
        ("rouge-l", "a b c d", ["a c x d"], 3 / 4),
        # the union over sentences: a b of the first, c d of the second, of 5 and 4 different words
        ("rouge-l", "a b x. c d", ["a b c d"], 2 * (4 / 5) * (4 / 4) / (4 / 5 + 4 / 4)),
        ("rouge-l", "", ["a"], 0.0),
        ("rouge-l", "b a", ["a b"], 1 / 2),
        # abcd -> abxd: three match, 2 * 3 / 8
        ("edit", "abcd", ["abxd"], 0.75),
        ("edit", "\n# note\n```\nx = 1\ny = 2", ["x = 1"], 1.0),
        ("edit", "// only", ["x"], 0.0),
        ("edit", "abc", ["abcdefg"], 0.6),
        ("classification", "It is Date.", ["Date"], 1.0),
        ("classification", "Date or City", ["Date"], 1 / 2),
        # "Place" is a part of the reference and does not count
        ("classification", "Other Place", ["Other Place"], 1.0),
        ("classification", "City", ["Date"], 0.0),
        ("number", "Paragraph 3, not 4", ["Paragraph 3"], 1 / 2),
        ("number", "17 17", ["17"], 1.0),
        ("number", "none", ["17"], 0.0),
    ],
)
def test_metrics_by_hand(metric, answer, references, wanted):
    assert score(metric, answer, references, ["Date", "City", "Place", "Other Place"]) == pytest.approx(
        wanted
    )


LINE = {"input": "Who?", "context": "Ann met Bob.", "answers": ["Ann"], "all_classes": None, "length": 3}


def put(folder, name, *records):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_longbench_files(words, tmp_path):
    put(tmp_path, "hotpotqa.jsonl", LINE, {**LINE, "input": "When?"}, LINE)
    put(tmp_path, "trec_e.jsonl", {**LINE, "all_classes": ["Ann", "Bob"]})
    put(tmp_path, "samsum.jsonl", LINE)
    put(tmp_path, "unknown.jsonl", {"x": 1})
    found = {q.id: q for q in longbench.load(tmp_path, words, 600, 2)}
    assert list(found) == ["hotpotqa 1", "hotpotqa 2", "trec_e 1", "samsum 1"]
    hotpot, trec, samsum = found["hotpotqa 1"], found["trec_e 1"], found["samsum 1"]
    assert (hotpot.max_tokens, hotpot.metric, hotpot.first_line) == (32, "f1", False)
    assert (trec.max_tokens, trec.metric, trec.classes, trec.first_line) == (
        64,
        "classification",
        ("Ann", "Bob"),
        True,
    )
    assert (samsum.min_tokens, words.decode(samsum.stop)) == (1, "\n")
    text = words.decode(hotpot.ids)
    assert text.index("Ann met Bob.") < text.index("Question: Who?") < text.index("Answer:")
    assert words.decode(trec.ids).endswith("Ann met Bob.\nWho?")
    put(tmp_path, longbench.PROMPTS, {"hotpotqa": "C: {context} Q: {input}"})
    (tmp_path / longbench.PROMPTS).write_text(json.dumps({"hotpotqa": "C: {context} Q: {input}"}))
    published = longbench.load(tmp_path, words, 600, 1)[0]
    assert words.decode(published.ids) == "C: Ann met Bob. Q: Who?"
    assert len(longbench.TASKS) == 16


def test_the_middle_is_left_out(words, tmp_path):
    text = " ".join(map(str, range(100)))
    assert longbench.truncate(text, words, 199) == text
    assert longbench.truncate(text, words, 7) == "0 1" + "98 99"
    put(tmp_path, "lcc.jsonl", {**LINE, "context": "word " * 2000})
    (question,) = longbench.load(tmp_path, words, 500, 1)
    assert len(question.ids) + question.max_tokens <= 500
    assert words.decode(question.ids).endswith("Next line of code:\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not an object"),
        (json.dumps(LINE) + '\n{"input": "a"}', "line 2: context must be text, got None"),
        (json.dumps({**LINE, "answers": []}), "line 1: answers must be a list of texts"),
        (json.dumps({**LINE, "all_classes": "x"}), "line 1: all_classes must be a list or null"),
        ("\n", "holds no question"),
    ],
)
def test_bad_longbench_files_are_named_by_line(content, message, words, tmp_path):
    (tmp_path / "qasper.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        longbench.load(tmp_path, words, 500, None)
    (tmp_path / longbench.PROMPTS).write_text("[]")
    with pytest.raises(InputError, match="must map data sets to prompts"):
        longbench.load(tmp_path, words, 500, None)
