"""`foretell inspect`: what a model is and how it would run, without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.console import model_progress, print_json, stdout


def inspect(
    model: Annotated[str, typer.Argument(help="Catalogue name, folder, .gguf file or hub id.")],
    as_json: opt.JsonOpt = False,
) -> None:
    """Show architecture, sizes, which code runs it, and which drafters fit."""
    from foretell.models.catalog import locate

    with model_progress() as report:
        folder = locate(model, report)
    facts = describe(folder)
    if as_json:
        print_json(facts)
        return
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), text)
    stdout().print(table)


def describe(folder: Path) -> dict[str, Any]:
    """Facts about a model folder.

    Raises:
        InputError: it is not a usable model.
    """
    from foretell.models.config import architecture_of, read_config
    from foretell.models.load import end_token_ids
    from foretell.models.tokenizer import Tokenizer
    from foretell.models.weights import Checkpoint

    config = read_config(folder)
    tokenizer = Tokenizer(folder)
    checkpoint = Checkpoint(folder)
    sizes = checkpoint.sizes()
    impl, why = _impl(config)
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or (
        config["hidden_size"] // heads if heads and "hidden_size" in config else None
    )
    layers = config.get("num_hidden_layers")
    facts: dict[str, Any] = {
        "folder": str(folder),
        "architecture": architecture_of(config),
        "impl": impl,
        "impl_reason": why,
        "parameters": sum(count for count, _ in sizes.values()),
        "weights_mb": round(sum(size for _, size in sizes.values()) / 1e6, 1),
        "layers": layers,
        "hidden": config.get("hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "vocabulary": config.get("vocab_size"),
        "tokenizer": tokenizer.size,
        "context": config.get("max_position_embeddings"),
        "end_ids": sorted(end_token_ids(folder, config, tokenizer)),
        "chat_template": tokenizer.chat_template is not None,
        "drafters": _drafters(folder),
    }
    if layers and kv_heads and dim:
        facts["kv_bytes_per_token_fp32"] = 2 * layers * kv_heads * dim * 4
    return facts


def _drafters(folder: Path) -> list[str]:
    """Drafters that fit: with what they need, and without where the checkpoint brings it along."""
    from foretell.drafters import DRAFTERS
    from foretell.heads.medusa import has_medusa
    from foretell.heads.mtp import has_mtp

    inside = {"medusa": has_medusa, "mtp": has_mtp}
    out = []
    for name, entry in DRAFTERS.items():
        own = entry.argument is None or (name in inside and inside[name](folder))
        out.append(name if own else f"{name}:{(entry.argument or '').strip('[]')}")
    return out


def _impl(config: dict[str, Any]) -> tuple[str, str]:
    from foretell.models.config import Unsupported, architecture_of, decoder_config
    from foretell.models.hf import TESTED

    try:
        decoder_config(config)
    except Unsupported as reason:
        if architecture_of(config) in TESTED:
            return "hf", f"transformers' graph: {reason}"
        return "hf, with --allow-untested", f"{reason}, and it has no parity test"
    return "decoder", "the own decoder runs it"
