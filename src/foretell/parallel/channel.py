"""What rank 0 tells the others to do. They wait for it as long as it takes; a rank that is gone is noticed at
once, since its connection breaks, and one that hangs when it does not take a command in time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import RankError

_FIRST = 8192  # bytes of the message that every command is; a longer one goes on in a second
_SIZE = 8  # of them for its length


@dataclass(frozen=True, slots=True)
class Channel:
    """Commands from rank 0.

    Args:
        rank, size: of this process, of the group.
        process_group: of its own, on the CPU, which waits without a limit; unused where `size` is 1.
        timeout: seconds in which the others take a command.
        explain: says which rank is to blame when one cannot be reached.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    timeout: float
    explain: Callable[[str], str]

    def send(self, command: tuple[Any, ...]) -> None:
        """From rank 0 to all others.

        Raises:
            RankError: one of them is gone, or does not take it in time.
        """
        if self.size == 1:
            return
        payload = pickle.dumps(command)
        whole = len(payload).to_bytes(_SIZE, "little") + payload
        whole += bytes(max(0, _FIRST - len(whole)))
        message = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        try:
            for part in (message[:_FIRST], message[_FIRST:]):
                if len(part):
                    self._to_all(part)
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error

    def receive(self) -> tuple[Any, ...]:
        """The next command.

        Raises:
            RankError: rank 0 is gone.
        """
        first = torch.empty(_FIRST, dtype=torch.uint8)
        self._from_leader(first)
        size = int.from_bytes(bytes(first[:_SIZE].tolist()), "little")
        rest = torch.empty(max(0, _SIZE + size - _FIRST), dtype=torch.uint8)
        if len(rest):
            self._from_leader(rest)
        payload = torch.cat([first, rest])[_SIZE : _SIZE + size]
        command: tuple[Any, ...] = pickle.loads(payload.numpy().tobytes())
        return command

    def _to_all(self, part: torch.Tensor) -> None:
        works = [dist.isend(part, peer, self.process_group) for peer in range(self.size) if peer != self.rank]
        for work in works:
            assert work is not None, "this process belongs to the group"
            work.wait(timedelta(seconds=self.timeout))

    def _from_leader(self, room: torch.Tensor) -> None:
        try:
            dist.recv(room, 0, self.process_group)
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error
