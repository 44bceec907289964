"""How a head does in the engine itself, on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.api import LLM
from foretell.models.load import LoadedModel
from foretell.train.answers import Sample
from foretell.types import SamplingParams


class Validation:
    """Prompts that judge a head.

    Args:
        loaded: the target.
        samples: whose prompts are answered.
        max_tokens: of an answer.
        kind: the drafter's name.
    """

    def __init__(self, loaded: LoadedModel, samples: Sequence[Sample], max_tokens: int, kind: str) -> None:
        self._loaded, self._kind = loaded, kind
        self._prompts = [list(sample.tokens[: sample.prompt]) for sample in samples]
        self._params = SamplingParams(max_tokens=max_tokens)

    def __call__(self, folder: Path) -> dict[str, Any]:
        """Acceptance length of the head in `folder`, drafting as many tokens as suit it, and the share of
        its drafts whose first n tokens were accepted."""
        longest = max(map(len, self._prompts)) + self._params.max_tokens
        llm = LLM(
            self._loaded,
            drafter=f"{self._kind}:{folder}",
            adaptive=False,
            max_batch=4,
            kv_tokens=4 * (longest + 64),
        )
        llm.generate(self._prompts, self._params)
        stats = llm.engine.stats
        return {
            "al": round(stats.al, 4),
            "accepted_at": [round(share, 4) for share in stats.marginal],
            "drafts": stats.drafts,
        }
