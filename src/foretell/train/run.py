"""From a target and prompts to a trained head: answers, states, training, checkpoint, provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.api import LLM
from foretell.bench.provenance import provenance
from foretell.errors import InputError
from foretell.models.config import read_config
from foretell.train.answers import Advance, AnswerSettings, Sample, write_answers
from foretell.train.curves import draw
from foretell.train.data import Prompts
from foretell.train.export import copy_tokenizer, save_head
from foretell.train.files import replaced
from foretell.train.heads import RECIPES, Recipe, Shape
from foretell.train.losses import LOSSES
from foretell.train.measure import Validation
from foretell.train.objective import Objective, Teacher, Weights
from foretell.train.precision import pick_precision, reader
from foretell.train.resume import load_head
from foretell.train.states import StateStore
from foretell.train.trainer import Trainer, TrainSettings
from foretell.train.vocabulary import DraftVocabulary, choose_vocabulary, known_vocabulary
from foretell.types import Needs


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained.

    Args:
        kind: one of `RECIPES`.
        out: folder of the head; `out`/run holds what a killed run goes on from.
        cache: folder of answers and states, shared by the jobs of a target.
        cache_bytes: that states may take; 0 = they are computed anew each time.
        answers, settings: see there.
        weights: of the objective.
        loss: one of `LOSSES`.
        inner, draft_vocab, heads, depth, small: shape; see `Shape`.
        held: samples that judge instead of being learned from.
        judged_tokens: of a judged answer.
        init: a head to go on from; None = a new one.
        precision: in which the target reads the answers; one of `PRECISIONS`.
    """

    kind: str
    out: Path
    cache: Path
    cache_bytes: int
    answers: AnswerSettings
    settings: TrainSettings
    weights: Weights
    loss: str = "ce"
    inner: int | None = None
    draft_vocab: int | None = None
    heads: int = 4
    depth: int = 1
    small: tuple[int, int, int] = (4, 192, 3)
    held: int = 16
    judged_tokens: int = 64
    init: Path | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name in ("heads", "depth", "held", "judged_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.weights.depths < 1:
            raise InputError(f"depths must be at least 1, got {self.weights.depths}")
        if self.weights.among < 0:
            raise InputError(f"among must be 0 or above, got {self.weights.among}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trained head. `log`: see `Trainer`."""

    folder: Path
    best: float
    best_step: int
    coverage: float
    samples: int
    log: list[dict[str, Any]] = field(repr=False)


_DRAFT_VOCAB = 4096


def train_head(llm: LLM, prompts: Prompts, job: Job, advance: Advance) -> Outcome:
    """Trains one head; what an interrupted run has finished is not done again.

    Raises:
        InputError: something does not fit, or a disk is full.
        TrainingStopped: the loss became no number.
    """
    recipe, target, loss = RECIPES[job.kind], llm.loaded.model, LOSSES[job.loss]
    given, dtype = _check(llm, job), pick_precision(job.precision, target.device)
    answers = _answers_path(llm, prompts, job)
    _make_folders(job)
    samples = write_answers(llm, prompts, job.answers, answers, advance)
    taught, held = _split(samples, job)
    if given is None:
        vocabulary = _vocabulary(llm, job, recipe, taught)
        teacher = Teacher(target, vocabulary.ids_V)
        head, config = _new_head(llm, job, recipe, teacher)
    else:
        head, config = given
        ids_V: Tensor | None = head.target_ids  # type: ignore[assignment]
        vocabulary = known_vocabulary(torch.arange(target.vocab_size) if ids_V is None else ids_V, taught)
        teacher = Teacher(target, vocabulary.ids_V)
    objective: Objective = recipe.objective(head, teacher, job.weights, loss)
    store = _store(llm, head.needs, samples, job, dtype, answers, advance)  # type: ignore[arg-type]
    judge, latest = Validation(llm.loaded, held, job.judged_tokens, job.kind), job.out / "run" / "latest"

    def write(folder: Path) -> None:
        save_head(job.kind, head, config, None if recipe.model else vocabulary.ids_V, folder)
        if recipe.model:
            copy_tokenizer(llm.loaded.folder, folder)

    def evaluate(step: int) -> dict[str, Any]:
        write(latest)
        return judge(latest)

    facts = _facts(llm, prompts, job, dtype, len(taught), answers.stem)
    trainer = Trainer(
        head,
        objective,
        store,
        taught,
        job.settings,
        facts,
        job.out / "run",
        evaluate=evaluate,
        keep=lambda: write(job.out),
        advance=advance,
    )
    log = trainer.run()
    _report(job, prompts, log, facts, vocabulary)
    best = max((entry for entry in log if "evaluation" in entry), key=lambda e: e["evaluation"]["al"])
    return Outcome(job.out, best["evaluation"]["al"], best["step"], vocabulary.coverage, len(taught), log)


def _check(llm: LLM, job: Job) -> tuple[nn.Module, dict[str, Any]] | None:
    """The head to go on from, if any; what is wrong with it would only show once the answers are there."""
    target = llm.loaded.model
    if job.init is not None:
        return load_head(job.kind, job.init, target)
    if job.draft_vocab is not None and job.draft_vocab > target.vocab_size:
        size = target.vocab_size
        raise InputError(f"draft_vocab must be at most the target's vocabulary {size}, got {job.draft_vocab}")
    return None


def _answers_path(llm: LLM, prompts: Prompts, job: Job) -> Path:
    about = json.dumps([llm.loaded.name, llm.loaded.model.weights, prompts.digest, asdict(job.answers)])
    return job.cache / f"answers-{hashlib.sha256(about.encode()).hexdigest()[:12]}.jsonl"


def _make_folders(job: Job) -> None:
    for folder in (job.out / "run", job.cache):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made: {error.strerror}") from error


def _store(
    llm: LLM,
    needs: Needs,
    samples: list[Sample],
    job: Job,
    dtype: torch.dtype,
    answers: Path,
    advance: Advance,
) -> StateStore:
    """The states, filled as far as they are kept."""
    model = reader(llm.loaded, dtype)
    arithmetic = "" if model is llm.loaded.model else "-bf16"
    folder = job.cache / f"states-{answers.stem.removeprefix('answers-')}{arithmetic}"
    store = StateStore(model, needs, samples, folder if job.cache_bytes else None, job.cache_bytes)
    if job.cache_bytes:
        folder.mkdir(parents=True, exist_ok=True)
        store.fill(advance)
    return store


def _split(samples: list[Sample], job: Job) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from and samples that judge, the last ones."""
    taught = samples[: -job.held]
    if not any(len(sample.tokens) - sample.prompt > 2 for sample in taught):
        raise InputError(
            f"{len(samples)} answers are too few: {job.held} judge, and none is left to learn from",
            hint="give more --data, or a smaller --held",
        )
    return taught, samples[-job.held :]


def _vocabulary(llm: LLM, job: Job, recipe: Recipe, taught: list[Sample]) -> DraftVocabulary:
    most = llm.loaded.model.vocab_size
    size = most if recipe.model else job.draft_vocab or min(_DRAFT_VOCAB, most)
    return choose_vocabulary(taught, size, most, sorted(llm.loaded.end_ids))


def _new_head(llm: LLM, job: Job, recipe: Recipe, teacher: Teacher) -> tuple[nn.Module, dict[str, Any]]:
    """A head to train, and its config.json."""
    target, folder = llm.loaded.model, llm.loaded.folder
    given = job.inner, len(teacher.ids_V), job.heads, job.depth, job.small
    shape = Shape(read_config(folder), target.num_layers, *given, folder)
    with torch.random.fork_rng():
        torch.manual_seed(job.settings.seed)
        head = recipe.make(shape, teacher.head_VW)
    return head.to(target.device), recipe.config(shape)


def _facts(
    llm: LLM, prompts: Prompts, job: Job, dtype: torch.dtype, samples: int, answers: str
) -> dict[str, Any]:
    """What a run is known by; another is not gone on with."""
    return {
        "kind": job.kind,
        "target": llm.loaded.name,
        "weights": llm.loaded.model.weights,
        "precision": "fp32" if dtype == torch.float32 else "bf16",
        "data": prompts.digest,
        "answers": answers,
        "samples": samples,
        "objective": asdict(job.weights),
        "loss": job.loss,
        "shape": [job.inner, job.draft_vocab, job.heads, job.depth, job.small],
        "held": [job.held, job.judged_tokens],
        "init": None if job.init is None else str(job.init),
    }


def _report(
    job: Job,
    prompts: Prompts,
    log: list[dict[str, Any]],
    facts: Mapping[str, Any],
    vocabulary: DraftVocabulary,
) -> None:
    """provenance.json and curves.png beside the head."""
    judged = [{"step": e["step"], **e["evaluation"]} for e in log if "evaluation" in e]
    about = {
        "provenance": provenance(),
        "run": {**facts, **asdict(job.settings)},
        "skipped_lines": dict(prompts.skipped),
        "draft_vocabulary": {"size": len(vocabulary.ids_V), "coverage": round(vocabulary.coverage, 4)},
        "steps": sum("loss" in entry for entry in log),
        "evaluations": judged,
    }
    with replaced(job.out / "provenance.json") as half:
        half.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    draw(log, job.kind, job.out / "curves.png")


def with_defaults(kind: str, **given: Any) -> tuple[Weights, float]:
    """The recipe's weights and rate, with those that were given (not None) in place of its own."""
    recipe = RECIPES[kind]
    rate = given.pop("rate", None)
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(recipe.weights, **changes), recipe.rate if rate is None else rate
