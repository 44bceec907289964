"""The arithmetic of speculation: what to expect before anything is measured.

Symbols: p chance that a draft token is accepted, each on its own; N drafted tokens; alpha what one more
verified row costs, in plain steps; T_draft time of a whole draft, in plain steps.

Sources: Leviathan et al. 2023 (section 3); Ring Attention (Liu et al. 2023, section 3), Meta's context
parallelism (2411.01783, section 3.3) for the overlap condition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import InputError

_LONGEST = 4096  # drafts that a search for the best length looks at


def expected_tokens(p: float, n: int) -> float:
    """Tokens per verification: 1 + p + p^2 + ... + p^N."""
    return float(n + 1) if p == 1 else (1 - p ** (n + 1)) / (1 - p)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What decides whether speculation pays.

    Args:
        p: acceptance of a draft token, in [0, 1].
        alpha: cost of one more verified row, in plain steps; 0 = free.
        draft_cost: cost of one drafted token, in plain steps.
        draft_start: cost of a draft however long it is, in plain steps.

    Raises:
        InputError: a value outside its range.
    """

    p: float
    alpha: float
    draft_cost: float = 0.0
    draft_start: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(f"p must be between 0 and 1, got {self.p}")
        for name in ("alpha", "draft_cost", "draft_start"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be 0 or above, got {value}")

    def speedup(self, n: int) -> float:
        """Against plain decoding, with drafts of n tokens; n = 0 is plain decoding."""
        if n == 0:
            return 1.0
        draft = self.draft_start + self.draft_cost * n
        return expected_tokens(self.p, n) / (draft + 1 + self.alpha * n)

    def best_n(self) -> int:
        """The draft length with the highest speedup; 0 = speculation does not pay.

        Where both a token's acceptance and its cost leave no limit (p = 1, or everything free), the
        longest that is looked at.
        """
        best = max(range(1, _LONGEST + 1), key=lambda n: (self.speedup(n), -n))
        return best if self.speedup(best) > 1 else 0

    def asymptote(self) -> float:
        """What the speedup tends to as p tends to 1 and N grows: one token per row's cost."""
        per_token = self.alpha + self.draft_cost
        return 1 / per_token if per_token > 0 else math.inf


def weight_reads(tokens: int, target_bytes: float, draft_bytes: float) -> tuple[float, float]:
    """Bytes of weights that are read for so many tokens: plainly, and in one verification of a draft whose
    own reading adds `draft_bytes`."""
    return tokens * target_bytes, target_bytes + draft_bytes


def kv_bytes(layers: int, tokens: int, width: int, bytes_per_value: int) -> int:
    """Keys and values of a context; `width` is key/value heads times head size."""
    return layers * tokens * width * 2 * bytes_per_value


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as a roofline.

    Args:
        bandwidth: bytes per second from memory.
        flops: operations per second.
    """

    bandwidth: float
    flops: float

    def step_seconds(self, rows: int, weight_bytes: float, parameters: float) -> float:
        """One pass of `rows` tokens: reading the weights, or computing, whichever takes longer."""
        return max(weight_bytes / self.bandwidth, 2 * parameters * rows / self.flops)

    def free_rows(self, bytes_per_parameter: float) -> float:
        """Rows from which on a pass is bound by computing: until there, more rows are free."""
        return self.flops * bytes_per_parameter / (2 * self.bandwidth)

    def alpha(self, batch: int, n: int, bytes_per_parameter: float) -> float:
        """Cost of one drafted row, in plain steps, when `batch` requests verify drafts of n tokens: 0 while
        memory is the limit, 1 where computing is the limit already without drafts."""
        free = self.free_rows(bytes_per_parameter)
        plain = max(free, batch)
        return (max(free, batch * (n + 1)) - plain) / (n * plain)


def ring_overlap_tokens(
    flops: float, link: float, heads: int, kv_heads: int, bytes_per_value: int, *, zigzag: bool = True
) -> float:
    """Tokens per device from which on ring attention hides its transfers.

    One step of the ring computes 4 c^2 Hq d operations (half of it with zigzag shards and a causal mask)
    while it sends 2 c Hkv d values; the transfer is hidden when c is at least this.
    """
    full = bytes_per_value / 2 * kv_heads / heads * flops / link
    return 2 * full if zigzag else full
