"""Reads checkpoints strictly: what a model needs and no more."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.errors import InputError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
# what trainers leave beside the weights
_OF_A_TRAINER = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)\b.*")
_HARMLESS = ("rotary_emb.inv_freq",)  # written by old exporters, derived from the config


class Checkpoint:
    """The tensors of a model folder, opened lazily.

    Args:
        folder: with safetensors files; or, where `pickled`, with pytorch_model.bin or another .bin or .pt
            file of tensors (draft heads are published so).

    Raises:
        InputError: no weight files, or one is damaged or truncated.
    """

    def __init__(self, folder: Path, *, pickled: bool = False) -> None:
        self.folder = folder
        paths = self._paths(folder, pickled)
        self._files = {path: _open(path) for path in paths}
        self._where = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _paths(folder: Path, pickled: bool) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise InputError(f"{index} cannot be read: {error!r}") from error
            paths = [folder / name for name in names]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths and pickled:
            found = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
            paths = [path for path in found if not _OF_A_TRAINER.match(path.name)]
        if not paths:
            hint = "save it again with save_pretrained(..., safe_serialization=True)"
            raise InputError(f"{folder} holds no .safetensors file", hint=hint)
        if missing := [path.name for path in paths if not path.exists()]:
            raise InputError(f"{folder} lacks the weight files {', '.join(missing)}")
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor.

        Raises:
            InputError: its shape is not `shape`.
        """
        tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Per tensor, its elements and its bytes; no tensor is read."""
        out = {}
        for name, path in self._where.items():
            part = self._files[path].get_slice(name)
            count = math.prod(part.get_shape())
            out[name] = count, count * self.dtype(name).itemsize
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, which is not read."""
        stored = self._files[self._where[name]].get_slice(name).get_dtype()
        return _DTYPES.get(stored, torch.float32)

    def require(
        self,
        names: Iterable[str],
        optional: Iterable[str] = (),
        beside: re.Pattern[str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Checks that the checkpoint holds exactly these tensors, and maybe the optional ones; names that
        `beside` matches belong to somebody else. With `shapes`, theirs are checked too.

        Raises:
            InputError: listing what is missing, unknown and misshaped.
        """
        wanted, held = set(names), {n for n in self._where if not n.endswith(_HARMLESS)}
        problems = []
        if missing := sorted(wanted - held):
            problems.append(f"missing: {', '.join(missing)}")
        unknown = held - wanted - set(optional)
        if unknown := {name for name in unknown if beside is None or not beside.match(name)}:
            problems.append(f"unknown: {', '.join(sorted(unknown))}")
        stored = {name: (self.shape(name), shape) for name, shape in (shapes or {}).items() if name in held}
        if wrong := [
            f"{n} is {own}, expected {want}" for n, (own, want) in sorted(stored.items()) if own != want
        ]:
            problems.append(f"misshaped: {'; '.join(wrong)}")
        if problems:
            raise InputError(f"{self.folder} does not fit its config.json; {'; '.join(problems)}")


class _File(Protocol):
    """What `safe_open` offers; `_Pickle` offers the same."""

    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> Any: ...


class _Pickle:
    """Tensors of a file written by torch.save; nothing but tensors is unpickled."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, Tensor] = _load_pickle(path)
        if not all(isinstance(value, Tensor) for value in self._tensors.values()):
            raise ValueError("it holds something other than tensors")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])


def _load_pickle(path: Path) -> Any:
    """The object of a file of torch.save, mapped where its format allows it.

    Raises:
        ValueError: it cannot be read, or holds more than tensors.
    """
    try:
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # a file of torch < 1.6 cannot be mapped
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever a damaged pickle makes the unpickler raise
        raise ValueError("it is no file of tensors, or holds code beside them") from None
    if not isinstance(value, dict):
        raise ValueError("it holds something other than tensors")
    return value


class _Slice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return next((name for name, dtype in _DTYPES.items() if dtype == self._tensor.dtype), "F32")


def _open(path: Path) -> _File:
    try:
        if path.suffix == ".safetensors":
            opened: _File = safe_open(path, framework="pt")
            return opened
        return _Pickle(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or truncated: {error}") from error


def join(parts: list[Tensor], device: torch.device) -> Tensor:
    """Several weights as one along the first dimension, in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.cat([part.to(device=device, dtype=dtype) for part in parts])
