"""Short prompts of many, in order: long ones cost most of the work of training and teach nothing by themselves.

Usage: python docs/recipes/choose.py FIRST.jsonl MORE.jsonl > CHOSEN.jsonl
FIRST: by `prompts.sh`, 600 per task. Its first 1,664 prompts are taken, and of the others those below 440 bytes.
MORE: by `prompts.sh`, 2,400 per task. What is new there is taken up to the length and the number of its task.
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


def main(first: str, more: str) -> None:
    with open(first, encoding="utf-8") as file:
        lines = list(file)
    chosen = lines[:1664] + [line for line in lines[1664:] if len(line.encode()) <= 440]
    known, taken = set(chosen) | set(lines), dict.fromkeys(LIMITS, 0)
    with open(more, encoding="utf-8") as file:
        for line in file:
            task = json.loads(line)["task"]
            longest, most = LIMITS[task]
            if line not in known and len(line) <= longest and taken[task] < most:
                taken[task] += 1
                chosen.append(line)
    rest = chosen[1664:]  # of one task after the other: mixed, so that `--limit` leaves out some of each
    random.Random(0).shuffle(rest)
    sys.stdout.writelines(chosen[:768] + rest + chosen[768:1664])


main(*sys.argv[1:])
