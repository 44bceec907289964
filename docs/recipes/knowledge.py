"""Prompts about what WordNet, some Wikipedia articles and newspaper texts know: to ask, to write, to summarise, to look up.

Usage: python docs/recipes/knowledge.py WORDNET_FOLDER GENSIM_FOLDER OUT.jsonl
WORDNET_FOLDER: of Debian's wordnet-base (data.noun). GENSIM_FOLDER: test_data of the Python package gensim
(lee_background.cor, enwiki-latest-pages-articles1...bz2). The same files give the same prompts.
"""

import bz2
import json
import random
import re
import sys
from pathlib import Path

COUNTS = {"ask": 900, "chat": 500, "summarise": 400, "grounded": 350}
KINDS = {"05": "thing", "06": "thing", "09": "thing", "13": "thing", "15": "place", "18": "person", "19": "thing", "20": "thing"}
ASKED = {
    "person": ("who was {s}", "when was {s} born", "What is {s} known for?", "where did {s} live", "Tell me about the life of {s}."),
    "place": ("where is {s}", "What is {s} famous for?", "what language is spoken in {s}", "how many people live in {s}",
              "When was {s} founded?"),
    "thing": ("what is {a}", "What is {a} used for?", "where does the word {s} come from", "How does one recognise {a}?",
              "who discovered or invented {a}", "what are the parts of {a}"),
}  # fmt: skip
CHATTED = {
    "person": ("Write a short biography of {s} for a school paper.", "Imagine that you are {s}. Introduce yourself.",
               "What would {s} say about our time? Write a letter of three paragraphs."),
    "place": ("Plan two days in {s} for a family, hour by hour.", "Write a blog post about a walk through {s}.",
              "Describe {s} to somebody who has never been there, with what one sees, hears and smells."),
    "thing": ("Explain {a} in simple words, with an example.", "Write a scene of a story in which {a} matters.",
              "Compare {a} with something that is often confused with it.", "List the pros and cons of {a}, then conclude.",
              "You are an expert on {a}. Answer the question of a beginner, and give a warning."),
}  # fmt: skip
LOOKED_UP = ("what is {s}", "What do the texts say about {s}?", "when was {s} first mentioned", "why is {s} important",
             "who is connected with {s}")  # fmt: skip


def nouns(folder: Path) -> list[tuple[str, str]]:
    """(kind, name) of people and places that have a name, and of things."""
    found = []
    for line in (folder / "data.noun").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if line.startswith(" ") or KINDS.get(fields[1]) is None:
            continue
        kind, name = KINDS[fields[1]], fields[4].replace("_", " ")
        named = " @i " in line
        if (kind == "thing") != named and name[0].isupper() == named:
            found.append((kind, name))
    return found


def about(forms: dict[str, tuple[str, ...]], known: list[tuple[str, str]], count: int, chance: random.Random) -> list[str]:
    made = []
    for _ in range(count):
        kind, name = chance.choice(known)
        article = "an" if name[0].lower() in "aeiou" else "a"
        made.append(chance.choice(forms[kind]).format(s=name, a=f"{article} {name}"))
    return made


def articles(path: Path) -> list[tuple[str, list[str]]]:
    """(title, paragraphs) of the articles, without markup."""
    text = bz2.decompress(path.read_bytes()).decode(errors="replace")
    found = []
    for title, body in re.findall(r"<title>([^<:/]+)</title>.*?<text[^>]*>(.*?)</text>", text, re.S):
        for old, new in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&"), ("&nbsp;", " ")):
            body = body.replace(old, new)
        body = re.sub(r"<!--.*?-->|<ref[^>/]*>.*?</ref>|<ref[^>]*/>|<[^>]+>", "", body, flags=re.S)
        while "{{" in body and (shorter := re.sub(r"\{\{[^{}]*\}\}", "", body)) != body:
            body = shorter
        body = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", body)
        body = re.sub(r"\[https?:\S*|'{2,}|\(\s*\)", "", body)
        lines = [" ".join(line.split()) for line in body.splitlines()]
        paragraphs = [line for line in lines if len(line) > 250 and line[0].isalnum() and "|" not in line]
        if paragraphs:
            found.append((title.split(" (")[0], paragraphs))
    return found


def main(wordnet: str, gensim: str, out: str) -> None:
    chance = random.Random(0)
    known = nouns(Path(wordnet))
    wiki = articles(next(Path(gensim).glob("enwiki-latest-pages-articles1*.bz2")))
    news = (Path(gensim) / "lee_background.cor").read_text(encoding="utf-8").splitlines()
    long = [" ".join(p[:3]) for _, paragraphs in wiki for p in (paragraphs[i : i + 3] for i in range(0, len(paragraphs), 3))]
    chance.shuffle(long)
    texts = [text[:2600] for text in [*news, *long] if len(text) > 600]
    looked_up = []
    pairs = [(title, paragraph) for title, paragraphs in wiki for paragraph in paragraphs]
    for title, paragraph in chance.sample(pairs, COUNTS["grounded"]):
        beside = [paragraph, *(p for _, p in chance.sample(pairs, 2))]
        chance.shuffle(beside)
        question = chance.choice(LOOKED_UP).format(s=title)
        looked_up.append("\n\n".join(p[:700] for p in beside) + f"\n\nQuestion: {question}")
    made = {
        "ask": about(ASKED, known, COUNTS["ask"], chance),
        "chat": about(CHATTED, known, COUNTS["chat"], chance),
        "summarise": [f"Summarize: {text}" for text in texts[: COUNTS["summarise"]]],
        "grounded": looked_up,
    }
    lines = [json.dumps({"task": task, "prompt": p}, ensure_ascii=False) for task, ps in made.items() for p in dict.fromkeys(ps)]
    chance.shuffle(lines)
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")


main(*sys.argv[1:])
