"""Reads safetensors checkpoints strictly: what a model needs and no more."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.errors import InputError

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_HARMLESS = ("rotary_emb.inv_freq",)  # written by old exporters, derived from the config


class Checkpoint:
    """The tensors of a model folder, opened lazily.

    Args:
        dtype: convert tensors to it; None = leave them as they are.

    Raises:
        InputError: no safetensors files, or one is damaged or truncated.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        self._dtype = dtype
        self._files = {path: self._open(path) for path in self._paths(folder)}
        self._where = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _paths(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise InputError(f"{index} cannot be read: {error!r}") from error
            paths = [folder / name for name in names]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            hint = "save it again with save_pretrained(..., safe_serialization=True)"
            raise InputError(f"{folder} holds no .safetensors file", hint=hint)
        if missing := [path.name for path in paths if not path.exists()]:
            raise InputError(f"{folder} lacks the weight files {', '.join(missing)}")
        return paths

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged or truncated: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor.

        Raises:
            InputError: its shape is not `shape`.
        """
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Per tensor, its elements and its bytes; no tensor is read."""
        out = {}
        for name, path in self._where.items():
            part = self._files[path].get_slice(name)
            count = math.prod(part.get_shape())
            out[name] = count, count * _BYTES.get(part.get_dtype(), 4)
        return out

    def require(self, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Checks that the checkpoint holds exactly these tensors, and maybe the optional ones.

        Raises:
            InputError: listing what is missing and what is unknown.
        """
        wanted, held = set(names), {n for n in self._where if not n.endswith(_HARMLESS)}
        problems = []
        if missing := sorted(wanted - held):
            problems.append(f"missing: {', '.join(missing)}")
        if unknown := sorted(held - wanted - set(optional)):
            problems.append(f"unknown: {', '.join(unknown)}")
        if problems:
            raise InputError(f"{self.folder} does not fit its config.json; {'; '.join(problems)}")


def join(parts: list[Tensor], device: torch.device) -> Tensor:
    """Several weights as one along the first dimension, in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.cat([part.to(device=device, dtype=dtype) for part in parts])
