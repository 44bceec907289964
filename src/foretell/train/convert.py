"""A head in the layouts of other engines, and theirs in ours.

Whatever loads can be written again: in our own format, as SafeAILab or SpecForge publish EAGLE heads, with a
speculators configuration, or as MEDUSA's authors publish theirs.

Shape suffixes: V vocabulary, W hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import KIND
from foretell.heads.eagle3 import Eagle3Head
from foretell.heads.medusa import MedusaHeads
from foretell.heads.vocabulary import head_rows, vocabulary_maps
from foretell.models.config import read_config
from foretell.models.load import LoadedModel
from foretell.registry import Registry
from foretell.train.export import prefix_of, save_head
from foretell.train.files import disk_error, replaced
from foretell.train.resume import KINDS, load_head

Tensors = dict[str, Tensor]
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a head is published.

    Args:
        kinds: heads that it knows.
        config: the head's flat config.json and its target -> its config.json.
        file: name of the file of tensors; .bin is pickled.
        at: name of an EAGLE-3 head's layer; "" = as it is.
        about: one line.
    """

    kinds: tuple[str, ...]
    config: Callable[[Mapping[str, Any], LoadedModel], dict[str, Any]]
    file: str
    at: str
    about: str


def _plain(config: Mapping[str, Any], target: LoadedModel) -> dict[str, Any]:
    """Layer ids name outputs there, but for the usual three."""
    layers, ids = target.model.num_layers, list(_ids(config))
    if not ids or ids == [2, layers // 2, layers - 3]:
        return dict(config)
    outputs = [layer - 1 for layer in ids]
    return {**config, "eagle_config": {"use_aux_hidden_state": True, _IDS: outputs}}


def _ids(config: Mapping[str, Any]) -> list[int]:
    return list((config.get("eagle_config") or {}).get(_IDS) or [])


def _speculators(config: Mapping[str, Any], target: LoadedModel) -> dict[str, Any]:
    """EAGLE-3 as the speculators library and vLLM read it."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    outer = {*flags, "architectures", "draft_vocab_size", "eagle_config", "torch_dtype", KIND}
    inner = {name: value for name, value in config.items() if name not in outer}
    architectures = read_config(target.folder).get("architectures", [])
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": architectures},
        },
        "transformer_layer_config": inner,
        "draft_vocab_size": config["draft_vocab_size"],
        _IDS: _ids(config),
        **{name: config[name] for name in flags if name in config},
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
    }


LAYOUTS: Registry[Layout] = Registry(
    "format",
    {
        "safeailab": Layout(("eagle", "eagle3"), _plain, "pytorch_model.bin", "midlayer.", "SafeAILab/EAGLE"),
        "specforge": Layout(("eagle3",), _plain, "model.safetensors", "midlayer.", "SpecForge, SGLang, vLLM"),
        "speculators": Layout(
            ("eagle3",), _speculators, "model.safetensors", "layers.0.", "speculators, vLLM"
        ),
        "medusa": Layout(("medusa",), _plain, "medusa_lm_head.safetensors", "", "FasterDecoding/Medusa"),
    },
)
OWN = "foretell"


def kind_of(folder: Path, given: str | None) -> str:
    """The kind of a head: as it is told, or as its config.json says.

    Raises:
        InputError: it cannot be told, or the two differ.
    """
    said = read_config(folder).get(KIND) if (folder / "config.json").is_file() else None
    if said is None and given is None:
        raise InputError(f"{folder} does not say what kind of head it is", hint=f"--kind {'|'.join(KINDS)}")
    if said is not None and given is not None and said != given:
        raise InputError(f"kind is {given!r}, but {folder} says it is {said!r}")
    kind = str(said or given)
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def convert(kind: str, source: Path, target: LoadedModel, form: str, out: Path) -> None:
    """Writes the head in `source` to `out` in another layout.

    Args:
        form: "foretell" or one of `LAYOUTS`.

    Raises:
        InputError: the head does not load, the layout has no such heads, or `out` cannot be written.
    """
    if form != OWN and form not in LAYOUTS:
        raise InputError(f"format must be one of {', '.join((OWN, *LAYOUTS))}, got {form!r}")
    head, config = load_head(kind, source, target.model)
    config = _flat(config)
    if isinstance(head, Eagle3Head):
        ids = list(head.config.aux_layers)
        config = {**config, "eagle_config": {"use_aux_hidden_state": True, _IDS: ids}}
    ids_V: Tensor | None = head.target_ids  # type: ignore[assignment]
    if form == OWN:
        save_head(kind, head, config, ids_V, out)
        return
    layout = LAYOUTS[form]
    if kind not in layout.kinds:
        able = [name for name, each in LAYOUTS.items() if kind in each.kinds]
        raise InputError(f"format {form} has no {kind} heads", hint=f"for {kind}: {', '.join((OWN, *able))}")
    tensors = _tensors(kind, head, config, layout)
    if kind == "medusa":
        tensors |= _outputs(head, target)  # type: ignore[arg-type]
    if ids_V is not None and kind == "eagle3":
        tensors |= vocabulary_maps(ids_V, target.model.vocab_size)
    _write(layout, tensors, layout.config(config, target), out)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators configuration, unfolded."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    skip = ("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version")
    flat = {**inner, **{name: value for name, value in config.items() if name not in skip}}
    flat.pop(_IDS, None)
    return {**flat, "architectures": ["LlamaForCausalLMEagle3"]}


def _tensors(kind: str, head: nn.Module, config: Mapping[str, Any], layout: Layout) -> Tensors:
    rename, out = prefix_of(kind, config), {}
    for slot in head.slots():  # type: ignore[operator]
        name = rename(slot.name)
        if kind == "eagle3" and name.startswith(("midlayer.", "layers.0.")):
            name = layout.at + name.removeprefix("midlayer.").removeprefix("layers.0.")
        out[name] = slot.view.detach().cpu().half().contiguous()
    return out


def _outputs(heads: MedusaHeads, target: LoadedModel) -> Tensors:
    """Output layers of their own, which the public layout wants: copies of the target's."""
    if len(heads.outputs):
        return {}
    every_V = torch.arange(target.model.vocab_size)
    weight_VW = head_rows(target.model, every_V).half().cpu().clone()
    return {f"medusa_head.{k}.{heads.depth}.weight": weight_VW.clone() for k in range(heads.count)}


def _write(layout: Layout, tensors: Tensors, config: Mapping[str, Any], out: Path) -> None:
    about = {name: value for name, value in config.items() if name != KIND}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with replaced(out / layout.file) as half:
            if layout.file.endswith(".bin"):
                torch.save(tensors, half)
            else:
                save_file(tensors, half, metadata={"format": "pt"})
        with replaced(out / "config.json") as half:
            half.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise disk_error(error, out, "nothing else is touched") from error
