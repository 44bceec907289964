"""The loop: batches in a seeded order, checkpoints that a killed run goes on from, early stop.

The state of a run is its checkpoint alone: with the same settings, a kill at any moment changes no weight.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretell.errors import InputError
from foretell.train.answers import Advance, Sample
from foretell.train.batch import groups, join
from foretell.train.files import disk_error, replaced
from foretell.train.objective import Objective
from foretell.train.states import StateStore


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a head is trained.

    Args:
        epochs: passes over the samples.
        rows: tokens of a batch.
        rate: learning rate at its highest.
        warmup: share of the steps during which it rises; it falls to a tenth by a cosine.
        clip: norm of the gradient.
        seed: of the order, the noise and the first weights.
        evaluate: steps between two evaluations; 0 = once per epoch.
        patience: evaluations without a better acceptance length until the run ends; 0 = it never does.
        save: steps between two checkpoints.
    """

    epochs: int = 4
    rows: int = 2048
    rate: float = 5e-4
    warmup: float = 0.05
    clip: float = 5.0
    seed: int = 0
    evaluate: int = 0
    patience: int = 0
    save: int = 50

    def __post_init__(self) -> None:
        for name in ("epochs", "rows", "save"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("evaluate", "patience", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be 0 or above, got {getattr(self, name)}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(f"rate must be above 0, got {self.rate}")


class TrainingStopped(RuntimeError):
    """The loss is no number any more; the last good checkpoint is kept."""


@dataclass(slots=True)
class _Progress:
    """What a checkpoint holds beside weights: the step, what was logged, the best evaluation."""

    step: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)
    best: float = 0.0
    best_step: int = -1
    worse: int = 0
    ended: bool = False


class Trainer:
    """One run.

    Args:
        head: what is trained.
        objective: its loss.
        store, samples: what it learns from.
        settings: see above.
        facts: what makes this run another than others in the same folder (JSON).
        folder: of its checkpoint.
        evaluate: the acceptance length of the head as it is; called with the step.
        keep: stores the head as the best so far.
        advance: called with (what, done, total).
    """

    def __init__(
        self,
        head: nn.Module,
        objective: Objective,
        store: StateStore,
        samples: Sequence[Sample],
        settings: TrainSettings,
        facts: Mapping[str, Any],
        folder: Path,
        *,
        evaluate: Callable[[int], dict[str, Any]],
        keep: Callable[[], None],
        advance: Advance,
    ) -> None:
        self._head, self._objective, self._store = head, objective, store
        self._sizes = [len(sample.tokens) for sample in samples]
        self._samples, self._settings = samples, settings
        self._facts = json.loads(json.dumps({**facts, **asdict(settings)}))
        self._path = folder / "checkpoint.pt"
        self._evaluate, self._keep, self._advance = evaluate, keep, advance
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._plan = [batch for epoch in range(settings.epochs) for batch in self._order(epoch)]
        self._at = _Progress()

    def run(self) -> list[dict[str, Any]]:
        """Trains to the end; returns the log.

        Raises:
            TrainingStopped: the loss is no number.
            InputError: the folder holds a run with other settings, or cannot be written.
        """
        self._restore()
        total, at = len(self._plan), self._at
        every = self._settings.evaluate or max(1, total // self._settings.epochs)
        self._advance("training", at.step, total)
        while at.step < total and not at.ended:
            self._step(at.step, total)
            at.step += 1
            if at.step % every == 0 or at.step == total:
                self._judge()
            if at.step % self._settings.save == 0 or at.step % every == 0 or at.step == total:
                self._store_checkpoint()
            self._advance("training", at.step, total)
        return at.log

    def _order(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self._samples)))
        random.Random(f"{self._settings.seed} {epoch}").shuffle(order)
        return groups(self._sizes, order, self._settings.rows)

    def _step(self, step: int, total: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.rate * self._share(step, total)
        numbers = self._plan[step]
        batch = join([self._samples[i] for i in numbers], self._store.get(numbers))
        chance = torch.Generator().manual_seed((self._settings.seed << 32) + step)
        judged = self._objective(batch, chance)
        if not bool(torch.isfinite(judged.loss)):
            raise TrainingStopped(
                f"the loss is {float(judged.loss.detach())} at step {step + 1}; {self._path} is earlier"
            )
        self._optimizer.zero_grad(set_to_none=True)
        judged.loss.backward()
        norm = nn.utils.clip_grad_norm_(self._head.parameters(), self._settings.clip)
        if not bool(torch.isfinite(norm)):
            raise TrainingStopped(
                f"the gradient is {float(norm)} at step {step + 1}; {self._path} is earlier"
            )
        self._optimizer.step()
        self._at.log.append(
            {
                "step": step + 1,
                "loss": float(judged.loss.detach()),
                "right": judged.right,
                "count": judged.count,
            }
        )

    def _share(self, step: int, total: int) -> float:
        """Of the highest rate."""
        rise = max(1, round(self._settings.warmup * total))
        if step < rise:
            return (step + 1) / rise
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))

    def _judge(self) -> None:
        at = self._at
        found = self._evaluate(at.step)
        at.log.append({"step": at.step, "evaluation": found})
        if found["al"] > at.best:
            at.best, at.best_step, at.worse = found["al"], at.step, 0
            self._keep()
        else:
            at.worse += 1
            at.ended = 0 < self._settings.patience <= at.worse

    def _store_checkpoint(self) -> None:
        state = {
            "facts": json.dumps(self._facts, sort_keys=True),
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self._at),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self._path) as half:
                torch.save(state, half)
        except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
            cause = error if isinstance(error, OSError) else OSError(None, str(error).splitlines()[0])
            raise disk_error(cause, self._path, "the checkpoint before it is kept") from error

    def _restore(self) -> None:
        if not self._path.exists():
            return
        state = torch.load(self._path, map_location="cpu", weights_only=True)
        known, wanted = json.loads(state["facts"]), self._facts
        if known != wanted:
            other = sorted(name for name in {*known, *wanted} if known.get(name) != wanted.get(name))
            raise InputError(
                f"{self._path.parent} holds a run with another {', '.join(other)}",
                hint="choose another --out, or remove it",
            )
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._at = _Progress(**state["progress"])
