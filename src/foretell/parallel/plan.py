"""What a ring of devices can do, by arithmetic: memory, the longest context, whether transfers are hidden,
and how long a prompt and a step take.

Sources: Liu et al. 2023 (section 3), Yang et al. 2024 (section 3.3). Weights are on every rank, keys and
values are spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import InputError
from foretell.parallel.choose import Link, Work, seconds
from foretell.planner.arithmetic import kv_bytes, ring_overlap_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's measures.

    Args:
        layers, heads, kv_heads, dim: attention layers, query heads, key/value heads, size of a head.
        parameters: of the whole model.
        value_bytes: of a weight, a key, a value.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    parameters: float = 0.0
    value_bytes: int = 2

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads must divide heads ({self.heads}), got {self.kv_heads}")

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return self.parameters * self.value_bytes

    def kv(self, tokens: int) -> int:
        """Bytes of keys and values of so many tokens."""
        return kv_bytes(self.layers, tokens, self.kv_heads * self.dim, self.value_bytes)


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's hardware.

    Args:
        memory: bytes.
        bandwidth: bytes per second from memory.
        link: computing, and transfers to the next rank.
    """

    memory: float
    bandwidth: float
    link: Link


@dataclass(frozen=True, slots=True)
class RingPlan:
    """A context over a ring of devices.

    Args:
        ranks: N.
        context: tokens of the prompt.

    Raises:
        InputError: fewer tokens than ranks, or no rank.
    """

    ranks: int
    context: int
    shape: Shape
    device: Device

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"gpus must be at least 1, got {self.ranks}")
        if self.context < self.ranks:
            raise InputError(
                f"context must be at least one token per device ({self.ranks}), got {self.context}"
            )

    @property
    def shard(self) -> int:
        """Tokens of the fullest rank."""
        return math.ceil(self.context / self.ranks)

    @property
    def rank_bytes(self) -> float:
        """Weights, keys and values of one rank, and the block that is on its way to it."""
        return (
            self.shape.weight_bytes
            + self.shape.kv(self.shard)
            + self.shape.kv(self.shard) / self.shape.layers
        )

    @property
    def fits(self) -> bool:
        """Whether that is no more than a device's memory."""
        return self.rank_bytes <= self.device.memory

    @property
    def largest_context(self) -> int:
        """Tokens that fit on these devices."""
        per_token = self.shape.kv(1) * (1 + 1 / self.shape.layers)
        return max(0, int((self.device.memory - self.shape.weight_bytes) / per_token)) * self.ranks

    @property
    def devices_needed(self) -> int | None:
        """The fewest devices that hold this context; None = the weights alone do not fit on one."""
        room = self.device.memory - self.shape.weight_bytes
        per_token = self.shape.kv(1) * (1 + 1 / self.shape.layers)
        return math.ceil(self.context / (room // per_token)) if room >= per_token else None

    @property
    def overlap_tokens(self) -> float:
        """Tokens per rank from which on computing hides transfers."""
        link, shape = self.device.link, self.shape
        return ring_overlap_tokens(link.flops, link.bandwidth, shape.heads, shape.kv_heads, shape.value_bytes)

    @property
    def hidden(self) -> bool:
        """Whether transfers are hidden while a prompt is read at once."""
        return self.ranks == 1 or self.context / self.ranks >= self.overlap_tokens

    @property
    def sent_bytes(self) -> float:
        """What a rank sends per layer while a prompt is read: 2 S Hkv d e (N - 1) / N."""
        return self.shape.kv(self.context) / self.shape.layers * (self.ranks - 1) / self.ranks

    @property
    def prefill_seconds(self) -> float:
        """To read the prompt at once, by pass-KV, at the given FLOP/s."""
        shape, link = self.shape, self.device.link
        work = Work(self.ranks, self.context, 0, shape.heads, shape.kv_heads, shape.dim, shape.value_bytes)
        products = 2 * shape.parameters * self.context / self.ranks / link.flops
        return products + shape.layers * seconds("pass-kv", work, link)

    def decode_seconds(self, rows: int = 1) -> float:
        """One step of so many rows: weights and own keys are read, results exchanged in every layer."""
        shape, device = self.shape, self.device
        read = (shape.weight_bytes + shape.kv(self.shard)) / device.bandwidth
        if self.ranks == 1:
            return read
        result = rows * shape.heads * (shape.dim + 1) * 4 * (self.ranks - 1)
        return read + shape.layers * (device.link.latency + result / device.link.bandwidth)
