"""Prompts to train on: most are short, because long ones cost most of the work, and some are as long as they come.

Usage: python docs/recipes/choose.py FIRST.jsonl MORE.jsonl > CHOSEN.jsonl
FIRST: by `prompts.sh`, 600 per task. Its first 1,664 prompts are taken, and of the others those below 440 bytes.
MORE: by `prompts.sh`, 2,400 per task. What is new there is taken up to the length and the number of its task, mixed with
the others of FIRST and cut at a number, and of what is left the longest texts to summarise and to be asked about.
"""

import json
import random
import sys

# task -> characters of a line at most, prompts at most
LIMITS = {
    "question": (440, 1300),
    "chat": (440, 2400),
    "translate": (440, 1000),
    "code": (700, 800),
    "ask": (440, 2400),
    "continue": (700, 500),
    "summarise": (1100, 300),
    "grounded": (1300, 2400),
}
SHORT, LAST = 4544, 64  # of the mixed ones; LAST of them come at the end, where a training holds out the last few
LONGEST = {"summarise": 250, "grounded": 150}


def longest(lines: list[str]) -> list[str]:
    """The longest of each task, mixed."""
    found = []
    for task, most in LONGEST.items():
        own = [line for line in lines if json.loads(line)["task"] == task]
        found += sorted(own, key=len, reverse=True)[:most]
    random.Random(0).shuffle(found)
    return found


def main(first: str, more: str) -> None:
    with open(first, encoding="utf-8") as file:
        lines = list(file)
    chosen = lines[:1664] + [line for line in lines[1664:] if len(line.encode()) <= 440]
    known, taken = set(chosen) | set(lines), dict.fromkeys(LIMITS, 0)
    with open(more, encoding="utf-8") as file:
        others = list(file)
    for line in others:
        task = json.loads(line)["task"]
        most_bytes, most = LIMITS[task]
        if line not in known and len(line) <= most_bytes and taken[task] < most:
            taken[task] += 1
            chosen.append(line)
    rest = chosen[1664:]  # of one task after the other
    random.Random(0).shuffle(rest)
    mixed = chosen[:768] + rest
    known.update(chosen)
    left = longest([line for line in others if line not in known])
    sys.stdout.writelines(mixed[:SHORT] + left + mixed[SHORT : SHORT + LAST])


main(*sys.argv[1:])
