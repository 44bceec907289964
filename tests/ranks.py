"""Runs a function on several ranks, in processes that exchange tensors over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from foretell.parallel.group import Group


def _enter(rank: int, size: int, folder: str, work: Callable[..., object], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(work(Group(rank, size), *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def on_ranks(size: int, work: Callable[..., object], *args: object) -> list[object]:
    """What `work(group, *args)` returned on each rank; one process each, but for a single rank."""
    if size == 1:
        return [work(Group(0, 1), *args)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (size, folder, work, args), size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]
