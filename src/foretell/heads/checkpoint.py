"""Reads a head from its published checkpoint, strictly, and makes it ready to run.

Many engines load a head whose names do not match without a word: random weights, acceptance near zero,
output still right. Here missing, unknown and misshaped tensors are an error that lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from foretell.errors import InputError
from foretell.heads.layers import Slot
from foretell.models.config import read_config
from foretell.models.weights import Checkpoint

KIND = "foretell_head"  # key of config.json in our own format: the drafter's name
H = TypeVar("H", bound=nn.Module)


def open_folder(folder: Path) -> tuple[dict[str, Any], Checkpoint]:
    """Configuration and tensors of a head's folder.

    Raises:
        InputError: one of them is missing or damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder", hint="give the folder of a draft head's checkpoint")
    return read_config(folder), Checkpoint(folder, pickled=True)


def check_kind(folder: Path, config: Mapping[str, Any], kind: str) -> None:
    """Our own format says what kind of head it is.

    Raises:
        InputError: it is of another kind.
    """
    if (said := config.get(KIND, kind)) != kind:
        raise InputError(
            f"{folder} is a head of kind {said!r}, not {kind!r}", hint=f"--drafter {said}:{folder}"
        )


def configured(folder: Path, make: Callable[[], H]) -> H:
    """What `make` builds from a configuration, without memory for its parameters.

    Raises:
        InputError: the configuration lacks a key or holds a bad value.
    """
    try:
        with torch.device("meta"):
            return make()
    except KeyError as error:
        raise InputError(f"{folder}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError, OverflowError) as error:
        raise InputError(f"{folder}/config.json holds a value that cannot be used: {error}") from error


def fill(
    head: H,
    slots: Callable[[], Iterable[Slot]],
    checkpoint: Checkpoint,
    *,
    rename: Callable[[str], str] = str,
    ignore: str = "",
) -> H:
    """Reads every slot of a head that `configured` made.

    Args:
        slots: of the head, asked again once it has memory.
        rename: from a slot's name to the checkpoint's.
        ignore: pattern of tensors of the file that are not the head's.

    Raises:
        InputError: missing, unknown or misshaped tensors, all of them.
    """
    shapes = {rename(slot.name): (slot.rows, *slot.value.shape[1:]) for slot in slots()}
    checkpoint.require(shapes, beside=re.compile(ignore) if ignore else None, shapes=shapes)
    floating = {checkpoint.dtype(name) for name in shapes} & {torch.float16, torch.bfloat16, torch.float32}
    head.to_empty(device="cpu")
    head.to(floating.pop() if len(floating) == 1 else torch.float32)
    with torch.no_grad():
        for slot in slots():
            name = rename(slot.name)
            slot.view.copy_(checkpoint.get(name, shapes[name]))
    return head
