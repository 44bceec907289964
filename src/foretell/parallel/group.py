"""The ranks that share a context, and how they exchange tensors.

One primitive: a set of sends and receives between pairs, which all ranks post in the same order. It costs one
latency, takes any sizes and works on gloo and NCCL alike; rings, gathers and all-to-alls are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from foretell.errors import RankError


@dataclass
class Pending:
    """An exchange under way. `keep` holds the tensors that it reads and writes."""

    works: list[dist.Work]
    keep: list[Tensor]
    explain: Callable[[str], str] = str

    def wait(self) -> None:
        """Until everything has been sent and received.

        Raises:
            RankError: another rank is gone, or did not answer in time.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error
        finally:
            self.works.clear()
            self.keep.clear()


@dataclass
class Group:
    """This process among its peers.

    Args:
        rank, size: of this process, of the group.
        process_group: of torch.distributed; None = the default one. Unused where `size` is 1.
        explain: says which rank is to blame for an error.

    Attributes:
        sent: bytes that this rank has sent, per purpose.
        exchanges: how many it has begun.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None
    explain: Callable[[str], str] = str
    sent: dict[str, int] = field(default_factory=dict)
    exchanges: int = 0

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def exchange(self, purpose: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """Posts what goes to each rank and what comes from it; both sides know the sizes.

        Args:
            purpose: under which the bytes are counted.
            sends, receives: contiguous tensors; empty ones are left out on both sides.

        Raises:
            RankError: another rank is gone.
        """
        self.exchanges += 1
        incoming = {peer: x for peer, x in receives.items() if x.numel()}
        outgoing = {peer: x for peer, x in sends.items() if x.numel()}
        self.sent[purpose] = self.sent.get(purpose, 0) + sum(x.nbytes for x in outgoing.values())
        operations = [dist.P2POp(dist.irecv, x, peer, self.process_group) for peer, x in incoming.items()]
        operations += [dist.P2POp(dist.isend, x, peer, self.process_group) for peer, x in outgoing.items()]
        if not operations:
            return Pending([], [])
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error
        return Pending(works, [*incoming.values(), *outgoing.values()], self.explain)

    def gather(self, purpose: str, own: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's tensor, in order of rank; `shapes` are known to all."""
        parts = [own if peer == self.rank else own.new_empty(shapes[peer]) for peer in range(self.size)]
        receives = {peer: parts[peer] for peer in self.others}
        self.exchange(purpose, dict.fromkeys(self.others, own), receives).wait()
        return parts
