"""Which way of ring attention is fastest: Meta's rule (Yang et al. 2024, section 3.3), and whether one
exchange beats a ring because messages are small."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.planner.arithmetic import ring_overlap_tokens


@dataclass(frozen=True, slots=True)
class Link:
    """What a rank computes and sends.

    Args:
        flops: operations per second of attention.
        bandwidth: bytes per second to the next rank.
        latency: seconds of an empty message.
    """

    flops: float
    bandwidth: float
    latency: float


# measured with two processes of one thread over loopback; a ring of devices over a fast link
GLOO = Link(2e10, 5e8, 1.4e-3)
NCCL = Link(3e14, 1e11, 2e-5)


@dataclass(frozen=True, slots=True)
class Work:
    """One layer's attention over the ranks.

    Args:
        ranks: N.
        new, cached: tokens that are computed (T), and that were before (P).
        heads, kv_heads, dim: of the layer.
        value_bytes: e.
    """

    ranks: int
    new: int
    cached: int
    heads: int
    kv_heads: int
    dim: int
    value_bytes: int

    @property
    def flops(self) -> float:
        """Operations of one rank; a row sees half of the new tokens on average."""
        return 4 * self.new * (self.cached + self.new / 2) * self.heads * self.dim / self.ranks

    @property
    def block_bytes(self) -> float:
        """Keys and values of one rank."""
        return 2 * (self.new + self.cached) / self.ranks * self.kv_heads * self.dim * self.value_bytes

    @property
    def query_bytes(self) -> float:
        """Queries of one rank."""
        return self.new / self.ranks * self.heads * self.dim * self.value_bytes

    @property
    def result_bytes(self) -> float:
        """One rank's rows as a partial result, fp32 with its logarithms."""
        return self.new / self.ranks * self.heads * (self.dim + 1) * 4


def prefers_kv(work: Work, link: Link) -> bool:
    """Meta's rule: pass-KV while keys and values are no larger than queries, or while computing hides them
    in any case."""
    if not work.new:
        return False
    smaller = work.new / (work.new + work.cached) >= 2 * work.kv_heads / work.heads
    enough = ring_overlap_tokens(
        link.flops, link.bandwidth, work.heads, work.kv_heads, work.value_bytes, zigzag=False
    )
    return smaller or work.new >= work.ranks * enough


def seconds(variant: str, work: Work, link: Link) -> float:
    """What the layer's attention takes.

    Args:
        variant: a key of `foretell.parallel.ring.VARIANTS`.
    """
    compute, steps = work.flops / link.flops, work.ranks - 1
    step = compute / work.ranks
    if variant == "pass-kv":
        return compute + steps * max(0.0, link.latency + work.block_bytes / link.bandwidth - step)
    if variant == "pass-q":
        back = link.latency + work.result_bytes / link.bandwidth if steps else 0.0
        return compute + steps * max(0.0, link.latency + work.query_bytes / link.bandwidth - step) + back
    gather = link.latency + steps * work.block_bytes / link.bandwidth if steps else 0.0
    return compute + max(0.0, gather - step)


def choose(work: Work, link: Link) -> str:
    """The variant for this work."""
    if not prefers_kv(work, link):
        return "pass-q"
    return min(("pass-kv", "all-gather"), key=lambda variant: seconds(variant, work, link))
