"""`foretell bench adapt`: how fast the planner notices a change of text."""

from __future__ import annotations

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, progress_bar, stdout
from foretell.cli.results import OUT, OutOpt, result_folder, save


def adapt(
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    max_tokens: opt.MaxTokensOpt = 128,
    weights: opt.WeightsOpt = "stored",
    as_json: opt.JsonOpt = False,
    out: OutOpt = OUT,
) -> None:
    """Code edits, then free text: drafts and speed step by step around the change."""
    from foretell.api import LLM
    from foretell.bench import adapt as bench
    from foretell.planner import load_or_measure

    result_folder(out)
    with model_progress() as report:
        llm = LLM(model, drafter=drafter, weights=weights, report=report)
    cost = load_or_measure(llm.loaded.model, llm.loaded.folder)
    items = bench.workload(llm, max_tokens)
    with progress_bar() as bar:
        task = bar.add_task("answers", total=len(items))
        steps = bench.run(llm, items, lambda: bar.advance(task))
    switch = bench.switch_of(steps)
    speed = {
        name: sum(step.speed(cost) for step in part) / len(part)
        for name, part in (
            ("edits", steps[:switch]),
            ("first_30_steps_of_free_text", steps[switch : switch + 30]),
            ("free_text", steps[switch:]),
        )
    }
    value = {
        "model": model,
        "weights": weights,
        "steps_to_adapt": bench.steps_to_adapt(steps, cost),
        "speed_to_plain": {name: round(x, 4) for name, x in speed.items()},
        "steps": len(steps),
    }
    drawn = [[s.part, s.drafted, s.accepted, s.emitted] for s in steps]
    save(out, "adapt", {"model": model, "drafter": drafter}, {**value, "drafts": drawn})
    bench.plot(steps, cost, out / "adapt.png")
    if as_json:
        print_json(value)
        return
    text = ", ".join(f"{x:.2f}x in {name.replace('_', ' ')}" for name, x in speed.items())
    stdout().print(
        f"{value['steps_to_adapt']} steps after the change ten steps together are at {bench.ENOUGH} of plain "
        f"speed or more; by the cost of rows: {text}"
    )
