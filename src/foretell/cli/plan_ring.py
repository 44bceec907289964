"""`foretell plan ring`: what a ring of devices holds and how fast it is, before anybody buys it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, stderr, stdout
from foretell.cli.results import OUT, OutOpt
from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.parallel.plan import RingPlan, Shape


def _option(name: str, text: str, least: float, *, default: str | None = None) -> Any:
    shown = text if default is None else f"{text}  [default: {default}]"
    return typer.Option(name, help=shown, min=least, show_default=default is None)


def ring(
    gpus: Annotated[int, _option("--gpus", "Devices in the ring.", 1)],
    link: Annotated[float, _option("--link", "From a device to the next: 10^9 bytes per second.", 1e-4)],
    context: Annotated[int, _option("--context", "Tokens of the prompt.", 1)],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Take the shape from this model's configuration.")
    ] = None,
    layers: Annotated[int | None, _option("--layers", "Layers.", 1, default="80")] = None,
    heads: Annotated[int | None, _option("--heads", "Query heads.", 1, default="64")] = None,
    kv_heads: Annotated[int | None, _option("--kv-heads", "Key/value heads.", 1, default="the heads")] = None,
    head_dim: Annotated[int | None, _option("--head-dim", "Size of a head.", 1, default="128")] = None,
    parameters: Annotated[
        float | None, _option("--parameters", "10^9 weights, on every device.", 0, default="0")
    ] = None,
    value_bytes: Annotated[int, _option("--value-bytes", "Of a weight, a key, a value.", 1)] = 2,
    tflops: Annotated[float, _option("--tflops", "Of a device: 10^12 operations per second.", 1e-6)] = 312.0,
    memory_gb: Annotated[float, _option("--memory-gb", "Of a device: 10^9 bytes.", 1e-3)] = 80.0,
    memory_gbs: Annotated[
        float, _option("--memory-gbs", "Of a device: 10^9 bytes per second from memory.", 1e-3)
    ] = 2000.0,
    latency_us: Annotated[float, _option("--latency-us", "Of a message: microseconds.", 0)] = 10.0,
    layout: Annotated[
        str, typer.Option("--layout", help="contiguous, striped or zigzag.", show_default=True)
    ] = "zigzag",
    out: OutOpt = OUT,
    as_json: opt.JsonOpt = False,
) -> None:
    """Memory per rank, overlap, prefill and decode time of a ring, and its timeline as a PNG."""
    from foretell.bench.timeline import draw
    from foretell.parallel.choose import Link
    from foretell.parallel.plan import Device, RingPlan
    from foretell.parallel.simulate import simulate

    rates = {"link": link, "tflops": tflops, "memory-gb": memory_gb, "memory-gbs": memory_gbs}
    for name, number in {**rates, "latency-us": latency_us, "parameters": parameters or 0.0}.items():
        if not math.isfinite(number):
            raise InputError(f"--{name} must be a finite number, got {number}")
    given = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shape = _shape(model, given, parameters, value_bytes)
    wire = Link(tflops * 1e12, link * 1e9, latency_us * 1e-6)
    plan = RingPlan(gpus, context, shape, Device(memory_gb * 1e9, memory_gbs * 1e9, wire))
    sizes = shape.heads, shape.kv_heads, shape.dim, shape.value_bytes
    timeline = simulate(gpus, plan.shard, *sizes, wire, layout)
    path = out / "ring.png"
    draw(timeline.spans, f"{gpus} devices, {plan.shard} tokens each, {layout}: one layer", path)
    stderr().print(f"wrote {path}", style="dim")
    value = _answer(plan)
    value["simulated"] = {
        "layout": layout,
        "layer_ms": round(1e3 * timeline.seconds, 4),
        "efficiency": round(timeline.efficiency, 4),
    }
    if as_json:
        print_json(value)
    else:
        _print(plan, value)


def _shape(
    model: str | None, given: dict[str, int | None], parameters: float | None, value_bytes: int
) -> Shape:
    from foretell.parallel.plan import Shape

    if model is None:
        heads = given["heads"] or 64
        sizes = given["layers"] or 80, heads, given["kv_heads"] or heads, given["head_dim"] or 128
        return Shape(*sizes, (parameters or 0.0) * 1e9, value_bytes)
    if clash := [name for name, value in {**given, "parameters": parameters}.items() if value is not None]:
        raise InputError(f"{clash[0]} has no effect with model: its configuration says it")
    from foretell.models.catalog import locate
    from foretell.models.config import read_config
    from foretell.models.weights import Checkpoint

    with model_progress() as report:
        folder = locate(model, report)
    config = read_config(folder)
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    weights = sum(count for count, _ in Checkpoint(folder).sizes().values())
    kv = int(config.get("num_key_value_heads") or heads)
    return Shape(int(config["num_hidden_layers"]), heads, kv, dim, float(weights), value_bytes)


def _answer(plan: RingPlan) -> dict[str, Any]:
    return {
        "gpus": plan.ranks,
        "context": plan.context,
        "kv_bytes": plan.shape.kv(plan.context),
        "devices_needed": plan.devices_needed,
        "rank": {
            "tokens": plan.shard,
            "kv_bytes": plan.shape.kv(plan.shard),
            "weight_bytes": plan.shape.weight_bytes,
            "bytes": plan.rank_bytes,
            "fits": plan.fits,
            "sent_bytes_per_layer": plan.sent_bytes,
        },
        "largest_context": plan.largest_context,
        "hidden_from_tokens_per_rank": round(plan.overlap_tokens),
        "transfers_hidden": plan.hidden,
        "prefill_s": plan.prefill_seconds,
        "decode_ms": 1e3 * plan.decode_seconds(),
    }


def _print(plan: RingPlan, value: dict[str, Any]) -> None:
    rank, console = value["rank"], stdout()
    needed = value["devices_needed"]
    console.print(
        f"keys and values: {value['kv_bytes'] / 1e9:.1f} GB in all; devices that hold them: "
        f"{'none, the weights do not fit' if needed is None else f'{needed} or more'}"
    )
    console.print(
        f"a rank: {rank['tokens']} tokens, {rank['bytes'] / 1e9:.1f} GB of "
        f"{plan.device.memory / 1e9:g} GB ({'fits' if rank['fits'] else 'DOES NOT FIT'}); largest context "
        f"{value['largest_context']} tokens"
    )
    console.print(
        f"transfers are {'hidden' if value['transfers_hidden'] else 'NOT hidden'}: from "
        f"{value['hidden_from_tokens_per_rank']} tokens per rank on they are; a rank sends "
        f"{rank['sent_bytes_per_layer'] / 1e9:.3f} GB per layer"
    )
    console.print(f"prefill {value['prefill_s']:.2f} s, a decoding step {value['decode_ms']:.2f} ms")
    simulated = value["simulated"]
    console.print(
        f"simulated, {simulated['layout']}: {simulated['layer_ms']:.3f} ms per layer of attention, "
        f"{100 * simulated['efficiency']:.0f} % of the ranks' time computing"
    )
