"""What speculation did: counters and seconds of a request or of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from foretell.types import DraftTree


@dataclass(slots=True)
class StepStats:
    """Counters and timings of a request or a run; names as in vLLM's metrics.

    Attributes:
        steps: forward passes that emitted tokens.
        plans: the planner's reasons, and for how many steps each held.
        drafts: verification passes with a draft.
        drafted, accepted: draft tokens proposed, and emitted because the target kept them; a stop string
            that later takes tokens of earlier steps back does not change that.
        emitted: tokens emitted; `first_emitted` of them by the step that ended the prompt.
        reused: prompt tokens that a prefix hit saved.
        preempted: times that slots were given back, and tokens read again.
        kv_read: tokens of the history whose keys and values verification passes read, after the prompt.
        proposed_at, accepted_at: per depth, drafts that reached so deep, and that were kept so deep.
        draft_s, target_s, verify_s, rest_s: seconds of steps after the prompt was read.
        prefill_s: seconds until the first token.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    first_emitted: int = 0
    reused: int = 0
    preempted: int = 0
    kv_read: int = 0
    plans: dict[str, int] = field(default_factory=dict)
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def al(self) -> float:
        """Acceptance length: 1 + accepted / drafts (1 without drafts)."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.target_s + self.verify_s + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first step's; of an answer of one step, over that step."""
        if self.decode_s > 0:
            return (self.emitted - self.first_emitted) / self.decode_s
        return self.emitted / self.prefill_s if self.prefill_s > 0 else 0.0

    def counters(self) -> dict[str, Any]:
        """Everything that can be added up, but the planner's reasons."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "plans"}

    def to_json(self) -> dict[str, Any]:
        """Counters, rates and seconds. `plain_equivalent_steps` is what plain decoding would take."""
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "al": round(self.al, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "plain_equivalent_steps": self.emitted,
            "steps": self.steps,
            "emitted": self.emitted,
            "reused": self.reused,
            "preempted": self.preempted,
            "kv_read": self.kv_read,
            "plans": self.plans,
            "marginal_acceptance": [round(x, 4) for x in self.marginal],
            "conditional_acceptance": [round(x, 4) for x in self.conditional],
            "seconds": {
                "prefill": round(self.prefill_s, 4),
                "draft": round(self.draft_s, 4),
                "target": round(self.target_s, 4),
                "verify": round(self.verify_s, 4),
                "rest": round(self.rest_s, 4),
            },
        }

    @property
    def marginal(self) -> list[float]:
        """Share of all drafts that were kept at least so deep."""
        return [n / self.drafts for n in self.accepted_at] if self.drafts else []

    @property
    def conditional(self) -> list[float]:
        """Share kept at a depth, of the drafts that were kept above it and reached it."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted_at, self.proposed_at, strict=True)]

    def record(self, tree: DraftTree, accepted: int, emitted: int) -> None:
        """Counts one verification: `accepted` draft tokens among `emitted` tokens."""
        self.steps += 1
        self.emitted += emitted
        if not len(tree):
            return
        self.drafts += 1
        self.drafted += len(tree)
        self.accepted += accepted
        deepest = max(tree.depth(node) for node in range(len(tree)))
        grow = [0] * (deepest - len(self.proposed_at))
        self.proposed_at += grow
        self.accepted_at += grow
        for depth in range(deepest):
            self.proposed_at[depth] += depth <= accepted
            self.accepted_at[depth] += depth < accepted

    def add(self, other: StepStats) -> None:
        """Adds another request's counters and timings to these."""
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, dict):
                setattr(self, item.name, {key: mine.get(key, 0) + its.get(key, 0) for key in {**mine, **its}})
            elif isinstance(mine, list):
                longest = max(len(mine), len(its))
                mine += [0] * (longest - len(mine))
                padded = [*its, *[0] * (longest - len(its))]
                setattr(self, item.name, [a + b for a, b in zip(mine, padded, strict=True)])
            else:
                setattr(self, item.name, mine + its)
