"""`foretell train KIND`: trains a draft head for a target, from prompts to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, named_progress, print_json, stderr, stdout
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.train.data import Prompts
    from foretell.train.run import Job, Outcome

app = typer.Typer(name="train", help="Train drafters for a model.", no_args_is_help=True)

KINDS = {
    "medusa": "MEDUSA heads: each foresees one of the next tokens from the last state.",
    "eagle": "An EAGLE-1 head: one layer that predicts the target's next state.",
    "eagle3": "An EAGLE-3 head: one layer on states of three depths, trained on its own drafts.",
    "draft": "A small decoder with the target's tokenizer, distilled.",
    "mtp": "A multi-token prediction module (DeepSeek's layout), trained recursively.",
}

TargetOpt = Annotated[
    str, typer.Option("--target", help="Model to draft for; as in generate.", show_default=True)
]
DataOpt = Annotated[
    list[Path],
    typer.Option(
        "--data",
        help="Prompts: .jsonl (prompt, question, turns or messages) or a folder of text; repeatable.",
    ),
]
LimitOpt = Annotated[
    int | None, typer.Option("--limit", help="Take the first so many prompts.  [default: all]", min=1)
]
CacheOpt = Annotated[
    Path,
    typer.Option("--cache", help="Folder of answers and states, shared by trainings.", show_default=True),
]
CacheGbOpt = Annotated[
    float,
    typer.Option(
        "--cache-gb", help="Disk that states may take; 0 = computed each time.", show_default=True, min=0
    ),
]
AnswerTokensOpt = Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer.", show_default=True)]
PromptOpt = Annotated[
    int, typer.Option("--max-prompt", help="Leave out longer prompts (tokens).", show_default=True)
]
WarmthOpt = Annotated[
    float, typer.Option("--temperature", "-t", help="Of the answers; 0 is greedy.", show_default=True)
]
SeedOpt = Annotated[
    int, typer.Option("--seed", help="Of answers, order and first weights.", show_default=True)
]
EpochsOpt = Annotated[int, typer.Option("--epochs", help="Passes over the answers.", show_default=True)]
RowsOpt = Annotated[int, typer.Option("--rows", help="Tokens of a batch.", show_default=True)]
RateOpt = Annotated[float | None, typer.Option("--rate", help="Learning rate.  [default: the head's]")]
LossOpt = Annotated[str, typer.Option("--loss", help="ce, or lk (acceptance itself).", show_default=True)]
DepthsOpt = Annotated[
    int | None, typer.Option("--depths", help="Tokens ahead to train.  [default: 7 eagle3, 3 mtp, 1 eagle]")
]
DecayOpt = Annotated[
    float | None,
    typer.Option("--decay", help="Weight of a token beside the one before.  [default: the head's]"),
]
AmongOpt = Annotated[
    int | None,
    typer.Option(
        "--among",
        help="Train a later token only where the one before was among so many of the likeliest;"
        " 0 = everywhere.  [default: 0]",
        min=0,
    ),
]
InnerOpt = Annotated[
    int | None, typer.Option("--inner", help="Width of the head's MLP.  [default: the target's]", min=1)
]
VocabOpt = Annotated[
    int | None,
    typer.Option("--draft-vocab", help="Most frequent tokens that are drafted.  [default: 4096]", min=1),
]
HeadsOpt = Annotated[int | None, typer.Option("--heads", help="MEDUSA's heads.  [default: 4]", min=1)]
BlocksOpt = Annotated[
    int | None, typer.Option("--blocks", help="Residual blocks of a MEDUSA head.  [default: 1]", min=1)
]
LayersOpt = Annotated[int | None, typer.Option("--layers", help="Of a small decoder.  [default: 4]", min=1)]
WidthOpt = Annotated[int | None, typer.Option("--width", help="Of a small decoder.  [default: 192]", min=1)]
HeldOpt = Annotated[int, typer.Option("--held", help="Last answers, which judge.", show_default=True)]
EvaluateOpt = Annotated[
    int, typer.Option("--evaluate", help="Steps between evaluations; 0 = once per epoch.", show_default=True)
]
PatienceOpt = Annotated[
    int,
    typer.Option(
        "--patience", help="Stop after so many evaluations without gain; 0 = never.", show_default=True
    ),
]
SaveOpt = Annotated[int, typer.Option("--save", help="Steps between checkpoints.", show_default=True)]
InitOpt = Annotated[Path | None, typer.Option("--init", help="Go on from this head.  [default: a new one]")]
BatchOpt = Annotated[int, typer.Option("--batch", help="Answers made at once.", show_default=True, min=1)]
PrecisionOpt = Annotated[
    str,
    typer.Option(
        "--precision",
        help="In which the target reads the answers: fp32, bf16, auto (bf16 where the machine has it).",
        show_default=True,
    ),
]
OutOpt = Annotated[
    Path | None, typer.Option("--out", help="Folder of the head.  [default: results/train/KIND]")
]


def _verb(kind: str) -> Callable[..., None]:
    """The verb of one kind of head."""

    def train(
        ctx: typer.Context,
        data: DataOpt,
        target: TargetOpt = "smollm2-135m",
        limit: LimitOpt = None,
        out: OutOpt = None,
        cache: CacheOpt = Path("results/train/cache"),
        cache_gb: CacheGbOpt = 20.0,
        max_tokens: AnswerTokensOpt = 128,
        max_prompt: PromptOpt = 1024,
        temperature: WarmthOpt = 0.0,
        seed: SeedOpt = 0,
        epochs: EpochsOpt = 4,
        rows: RowsOpt = 2048,
        rate: RateOpt = None,
        loss: LossOpt = "ce",
        depths: DepthsOpt = None,
        decay: DecayOpt = None,
        among: AmongOpt = None,
        inner: InnerOpt = None,
        draft_vocab: VocabOpt = None,
        heads: HeadsOpt = None,
        blocks: BlocksOpt = None,
        layers: LayersOpt = None,
        width: WidthOpt = None,
        held: HeldOpt = 16,
        evaluate: EvaluateOpt = 0,
        patience: PatienceOpt = 0,
        save: SaveOpt = 50,
        init: InitOpt = None,
        batch: BatchOpt = 16,
        precision: PrecisionOpt = "auto",
        weights: opt.WeightsOpt = "stored",
        device: opt.DeviceOpt = "auto",
        as_json: opt.JsonOpt = False,
    ) -> None:
        _run(kind, ctx.params)

    return train


for _kind, _about in KINDS.items():
    app.command(_kind, help=f"{_about} A killed run goes on where it was.")(_verb(_kind))


def _run(kind: str, given: dict[str, Any]) -> None:
    from foretell.api import LLM
    from foretell.train.data import read_prompts
    from foretell.train.run import train_head
    from foretell.train.trainer import TrainingStopped

    job = _job(kind, given)
    prompts = read_prompts(given["data"], given["limit"])
    _tell(prompts)
    with model_progress() as report:
        llm = LLM(
            given["target"],
            drafter="none",  # a full batch has no time for drafts
            weights=given["weights"],
            device=given["device"],
            max_batch=given["batch"],
            kv_tokens=given["batch"] * (job.answers.max_prompt + job.answers.max_tokens + 64),
            report=report,
        )
    with named_progress() as advance:
        try:
            outcome = train_head(llm, prompts, job, advance)
        except TrainingStopped as error:
            raise InputError(str(error), hint="lower --rate, or look at the data") from error
    _print(outcome, given["as_json"])


def _job(kind: str, given: dict[str, Any]) -> Job:
    from foretell.train.answers import AnswerSettings
    from foretell.train.run import Job, with_defaults
    from foretell.train.trainer import TrainSettings

    _without_effect(kind, given)
    weights, rate = with_defaults(
        kind, **{name: given[name] for name in ("depths", "decay", "among", "rate")}
    )
    answers = {name: given[name] for name in ("max_tokens", "max_prompt", "temperature", "seed")}
    names = ("epochs", "rows", "seed", "evaluate", "patience", "save")
    settings = TrainSettings(rate=rate, **{name: given[name] for name in names})
    return Job(
        kind=kind,
        out=given["out"] or Path("results/train") / kind,
        cache=given["cache"],
        cache_bytes=round(given["cache_gb"] * 1e9),
        answers=AnswerSettings(**answers),
        settings=settings,
        weights=weights,
        loss=given["loss"],
        inner=given["inner"],
        draft_vocab=given["draft_vocab"],
        heads=given["heads"] or 4,
        depth=given["blocks"] or 1,
        small=_small(given),
        held=given["held"],
        init=given["init"],
        precision=given["precision"],
    )


def _small(given: dict[str, Any]) -> tuple[int, int, int]:
    """Layers, width and query heads (64 wide where that divides) of a small decoder."""
    width = given["width"] or 192
    return given["layers"] or 4, width, max(1, width // 64)


_READ = {  # options that only some kinds read
    "medusa": ("decay", "among", "draft_vocab", "heads", "blocks"),
    "eagle": ("depths", "decay", "among", "inner", "draft_vocab"),
    "eagle3": ("depths", "decay", "among", "inner", "draft_vocab"),
    "mtp": ("depths", "decay", "among", "inner", "draft_vocab"),
    "draft": ("inner", "layers", "width"),
}


def _without_effect(kind: str, given: dict[str, Any]) -> None:
    """Warns of options that this kind of head, or a head that is gone on with, does not read."""
    shape = {"inner", "draft_vocab", "heads", "blocks", "layers", "width"}
    for name in sorted({option for options in _READ.values() for option in options}):
        if given[name] is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if name not in _READ[kind]:
            stderr().print(f"WARNING: {flag} has no effect: {kind} does not read it")
        elif given["init"] is not None and name in shape:
            stderr().print(f"WARNING: {flag} has no effect: --init has its shape already")


def _tell(prompts: Prompts) -> None:
    if prompts.skipped:
        left = ", ".join(f"{count} {reason}" for reason, count in prompts.skipped.items())
        stderr().print(f"WARNING: lines of the data that are left out: {left}")
    stderr().print(f"{len(prompts.messages)} prompts", style="dim")


def _print(outcome: Outcome, as_json: bool) -> None:
    value = {
        "folder": str(outcome.folder),
        "al": outcome.best,
        "step": outcome.best_step,
        "samples": outcome.samples,
        "coverage": round(outcome.coverage, 4),
    }
    if as_json:
        print_json(value)
        return
    stdout().print(
        f"{outcome.folder}: acceptance length {outcome.best:.2f} on held-out prompts "
        f"(step {outcome.best_step}); {outcome.samples} answers, "
        f"the draft vocabulary covers {outcome.coverage:.1%} of their tokens"
    )


@app.command()
def prompts(
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", help="Folder or file of text, beside Python's language reference; repeatable."
        ),
    ] = None,
    translate: Annotated[
        list[Path] | None,
        typer.Option("--translate", help="LANGUAGE=PATH of text to be translated to English; repeatable."),
    ] = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option("--questions", help="JSONL of questions, taken as they are; repeatable."),
    ] = None,
    per_task: Annotated[
        int, typer.Option("--per-task", help="Prompts of each task at most.", show_default=True, min=1)
    ] = 500,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice.", show_default=True)] = 0,
    out: Annotated[Path, typer.Option("--out", help="JSONL to write.", show_default=True)] = Path(
        "prompts.jsonl"
    ),
) -> None:
    """Make prompts to train on: code, prose, talk; and from what you give."""
    from collections import Counter

    from foretell.train.prompts import make_prompts, write_prompts

    made = make_prompts(text or [], translate or [], questions or [], per_task, seed)
    write_prompts(made, out)
    counts = Counter(one.task for one in made)
    stderr().print(
        f"wrote {out}: " + ", ".join(f"{n} {task}" for task, n in sorted(counts.items())), style="dim"
    )
