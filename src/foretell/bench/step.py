"""How long one step takes by the number of rows that it verifies, beside transformers.

Speculation pays when a pass over eight rows costs little more than a pass over one. Both run the same
weights in fp32 arithmetic behind the same context, in turn; medians are printed.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.attention import Segment, pack
from foretell.models.base import TargetModel

ROWS = (1, 2, 4, 8, 16)
StepFn = Callable[[int], float]  # rows -> seconds of one step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Median seconds of a step by rows."""

    name: str
    seconds: dict[int, float]

    def ratio(self, rows: int) -> float:
        """A step of `rows` rows in plain steps."""
        return self.seconds[rows] / self.seconds[1]

    def to_json(self, beside: StepTimes) -> dict[str, object]:
        return {
            "impl": self.name,
            "ms": {str(rows): round(1000 * seconds, 3) for rows, seconds in self.seconds.items()},
            "ratio_8_rows": round(self.ratio(8), 3),
            "plain_step_speed_vs_transformers": round(beside.seconds[1] / self.seconds[1], 3),
        }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_step(model: TargetModel, context: int) -> StepFn:
    """Steps of one of our models behind `context` tokens."""
    arena = model.new_arena(context + max(ROWS) + 1)
    tokens = [1 + i % (model.vocab_size - 1) for i in range(context + max(ROWS))]
    model.forward(pack([Segment(0, 0, tokens[:context])], arena))

    def step(rows: int) -> float:
        start = time.perf_counter()
        # a chain of drafts behind one pending token: every row gets logits, as in verification
        chain = list(range(-1, rows - 2))
        pending, draft = tokens[context : context + 1], tokens[context + 1 : context + rows]
        model.forward(pack([Segment(0, context, pending, draft, chain)], arena))
        _synchronize(model.device)
        return time.perf_counter() - start

    return step


def transformers_step(folder: Path, context: int, dtype: torch.dtype, device: torch.device) -> StepFn:
    """Steps of transformers' own model and cache behind `context` tokens."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    tokens = torch.tensor(
        [[1 + i % (model.config.vocab_size - 1) for i in range(context + max(ROWS))]], device=device
    )
    with torch.inference_mode():
        cache: Any = model(tokens[:, :context], past_key_values=DynamicCache()).past_key_values

    def step(rows: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model(tokens[:, context : context + rows], past_key_values=cache)
        _synchronize(device)
        seconds = time.perf_counter() - start
        cache.crop(-rows)
        return seconds

    return step


def measure(steps: dict[str, StepFn], repeats: int, on_round: Callable[[], None]) -> list[StepTimes]:
    """Every step function at every number of rows, in turn, `repeats` times after two warm-ups."""
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in steps}
    for repeat in range(repeats + 2):
        for rows in ROWS:
            for name, step in steps.items():
                seconds = step(rows)
                if repeat >= 2:
                    times[name][rows].append(seconds)
        on_round()
    return [
        StepTimes(name, {rows: statistics.median(each) for rows, each in by_rows.items()})
        for name, by_rows in times.items()
    ]


def plot(results: Sequence[StepTimes], path: Path, title: str) -> None:
    """Milliseconds and plain-step ratios by rows, as a PNG."""
    from foretell.bench.plots import figure

    fig, (left, right) = figure(title, columns=2)
    for result in results:
        left.plot(ROWS, [1000 * result.seconds[rows] for rows in ROWS], marker="o", label=result.name)
        right.plot(ROWS, [result.ratio(rows) for rows in ROWS], marker="o", label=result.name)
    left.set(xlabel="rows verified", ylabel="ms per step", ylim=(0, None))
    right.set(xlabel="rows verified", ylabel="cost in plain steps", ylim=(0, None))
    right.legend()
    fig.savefig(path)
