"""Token identity: every answer equal to plain decoding's, greedy and seeded, alone and in batches.

The batch of four is made so that it meets what could break identity: requests of unequal length that
start and end beside each other, and prompts whose beginning is already in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.api import LLM, Completion
from foretell.attention import Segment, pack
from foretell.bench.items import Item
from foretell.models.base import TargetModel
from foretell.types import SamplingParams

SETTINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=1234),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer left plain decoding's, and the two likeliest tokens of the target there."""

    item: str
    position: int
    plain_token: int
    token: int
    top: tuple[tuple[int, float], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Check:
    """One method in one setting at one batch size."""

    method: str
    setting: str
    batch: int
    answers: int
    tokens: int
    reused: int
    al: float
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "setting": self.setting,
            "batch": self.batch,
            "answers": self.answers,
            "tokens": self.tokens,
            "prefix_tokens_reused": self.reused,
            "al": round(self.al, 3),
            "identical": not self.differences,
            "differences": [
                {
                    "item": d.item,
                    "position": d.position,
                    "plain_token": d.plain_token,
                    "token": d.token,
                    "top": [list(pair) for pair in d.top],
                }
                for d in self.differences
            ],
        }


def check_identity(
    plain: LLM, methods: Mapping[str, LLM], items: Sequence[Item], on_answer: Callable[[], None]
) -> list[Check]:
    """Answers all items plainly, one by one from an empty cache, then by every method: in batches of
    four, and alone, where the prompt is found in the cache."""
    checks = []
    for llm in methods.values():
        llm.engine.cache.forget()
    for setting, params in SETTINGS.items():
        wanted = {}
        for item in items:
            plain.engine.cache.forget()
            (wanted[item.id],) = plain.generate(item.ids, params.replace(max_tokens=item.max_tokens))
            on_answer()
        for method, llm in methods.items():
            for batch in (4, 1):
                checks.append(_check(method, llm, setting, batch, items, wanted, on_answer))
    return checks


def _check(
    method: str,
    llm: LLM,
    setting: str,
    batch: int,
    items: Sequence[Item],
    wanted: Mapping[str, Completion],
    on_answer: Callable[[], None],
) -> Check:
    params = SETTINGS[setting]
    answers: dict[str, Completion] = {}
    expected: dict[str, list[int]] = {}
    for start in range(0, len(items), batch):
        group = items[start : start + batch]
        if batch > 1:
            # what an earlier request left behind: half of each prompt is a prefix hit
            halves = [item.ids[: max(1, len(item.ids) // 2)] for item in group]
            llm.generate(halves, SamplingParams(max_tokens=1))
        # limits differ, so that the requests of a batch end at different steps
        limits = [max(1, item.max_tokens - i) for i, item in enumerate(group)]
        each = [params.replace(max_tokens=limit) for limit in limits]
        done = llm.generate([item.ids for item in group], each)
        for item, limit, answer in zip(group, limits, done, strict=True):
            answers[item.id] = answer
            expected[item.id] = wanted[item.id].token_ids[:limit]
            on_answer()
    found = []
    for item in items:
        if (got := answers[item.id].token_ids) != expected[item.id]:
            found.append(_difference(llm.loaded.model, item, expected[item.id], got))
    drafts = sum(answer.stats.drafts for answer in answers.values())
    accepted = sum(answer.stats.accepted for answer in answers.values())
    return Check(
        method,
        setting,
        batch,
        len(answers),
        sum(len(answer.token_ids) for answer in answers.values()),
        sum(answer.stats.reused for answer in answers.values()),
        1 + accepted / drafts if drafts else 1.0,
        tuple(found),
    )


def _difference(model: TargetModel, item: Item, expected: Sequence[int], got: Sequence[int]) -> Difference:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(expected))
    tokens = [*item.ids, *expected[:at]]
    arena = model.new_arena(len(tokens))
    logits_V = model.forward(pack([Segment(0, 0, tokens)], arena)).logits_RV[0]
    top = torch.topk(logits_V, 2)
    pairs = [(int(i), float(v)) for i, v in zip(top.indices, top.values, strict=True)]
    plain_token = expected[at] if at < len(expected) else -1
    return Difference(item.id, at, plain_token, got[at] if at < len(got) else -1, (pairs[0], pairs[1]))
