"""Loads a model: name to folder, folder to the fastest implementation that can run it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.catalog import Report, locate
from foretell.models.config import Unsupported, architecture_of, read_config
from foretell.models.hf import TESTED, load_hf
from foretell.models.linear import check_weights
from foretell.models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

IMPLS = ("auto", "decoder", "hf")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `end_ids` are the tokens that end an answer."""

    name: str
    folder: Path
    model: TargetModel
    tokenizer: Tokenizer
    end_ids: frozenset[int]


def pick_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one. Under torchrun each process of a machine has a device of its own.

    Raises:
        InputError: no such device here.
    """
    if device == "auto":
        return _own_cuda() if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device must be auto, cpu or cuda[:N], got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda[:N], got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r} was asked for, but this machine has no CUDA device")
    return _own_cuda() if chosen == torch.device("cuda") else chosen


def _own_cuda() -> torch.device:
    place = os.environ.get("LOCAL_RANK")
    if place is None:
        return torch.device("cuda")
    if int(place) >= (count := torch.cuda.device_count()):
        raise InputError(
            f"torchrun started a process {place} on this machine, which has {count} CUDA devices",
            hint="start no more processes than devices (--nproc-per-node), or set device to cpu",
        )
    return torch.device("cuda", int(place))


def load_model(
    name: str,
    *,
    device: str = "auto",
    impl: str = "auto",
    weights: str = "stored",
    allow_untested: bool = False,
    dtype: torch.dtype | None = None,
    report: Report | None = None,
) -> LoadedModel:
    """Finds, fetches and loads a model.

    Args:
        name: see `locate`.
        device: "auto", "cpu" or "cuda[:N]".
        impl: "decoder" (own), "hf" (transformers' graph), "auto" (own where it can).
        weights: how matrices are kept: "stored" (as in the checkpoint), "fp32", "fp16", "int8" (CPU only).
        allow_untested: run architectures that have no parity test through transformers.
        dtype: of the arithmetic; None = `compute_dtype` of the device, what the engine is exact in.
        report: see `locate`.

    Raises:
        InputError: unknown, damaged or unsupported model.
    """
    if impl not in IMPLS:
        raise InputError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    where = pick_device(device)
    dtype = compute_dtype(where) if dtype is None else dtype
    check_weights(weights, where, dtype)
    folder = locate(name) if report is None else locate(name, report)
    config = read_config(folder)
    tokenizer = Tokenizer(folder)
    model = _load(folder, impl, where, dtype, weights, allow_untested)
    if allow_untested and (model.impl == "decoder" or architecture_of(config) in TESTED):
        _log.warning("allow_untested has no effect: %s is tested", architecture_of(config))
    return LoadedModel(name, folder, model, tokenizer, end_token_ids(folder, config, tokenizer))


def compute_dtype(device: torch.device) -> torch.dtype:
    """Arithmetic of a device: fp32 on the CPU, bf16 on CUDA."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _load(
    folder: Path, impl: str, device: torch.device, dtype: torch.dtype, weights: str, allow_untested: bool
) -> TargetModel:
    if impl != "hf":
        from foretell.models.decoder import load_decoder

        try:
            return load_decoder(folder, dtype, device, weights=weights)
        except Unsupported as reason:
            if impl == "decoder":
                architecture = architecture_of(read_config(folder))
                raise InputError(
                    f"the own decoder cannot run {architecture}: {reason}", hint="use --impl hf"
                ) from None
    return load_hf(folder, dtype, device, weights=weights, allow_untested=allow_untested)


def end_token_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens from generation_config.json, else config.json, else the tokenizer."""
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, read_config(folder, "generation_config.json"))
    for source in sources:
        if (value := source.get("eos_token_id")) is not None:
            return frozenset(value if isinstance(value, list) else [value])
    if not tokenizer.end_ids:
        _log.warning("%s names no end token: every answer will be max_tokens long", folder.name)
    return tokenizer.end_ids
