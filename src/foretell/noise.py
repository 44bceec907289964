"""Counter-based random numbers: every draw is a function of its key and of nothing before it.

A stateful generator makes a request's numbers depend on who else drew from it, on how many drafts
were rejected and on the batch. Here a draw is keyed by (request seed, stream, position, index), so
the noise of absolute position t is the same whether t was decoded plainly, verified inside a draft,
or recomputed after preemption. The mixing function is SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """Independent sources of randomness of one request. Sharing one between two of these biases the
    output of the rejection rules (vLLM PR 47386), so each use has its own."""

    TARGET = 0  # the noise g_t of the target's own token (coupled rule, bonus tokens)
    DRAFT = 1  # proposals of a sampled draft under the rejection rules
    ACCEPT = 2  # accept or reject
    RESIDUAL = 3  # the token that replaces a rejected one
    MIDDLE = 4  # seeds of a level between draft and target, which then has all these streams


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL2) & _MASK
    return z ^ (z >> 31)


def make_key(seed: int, stream: int, position: int) -> int:
    """The 64-bit key of one draw; any change in an argument gives an unrelated key."""
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key + (stream + 1) * _GOLDEN) & _MASK)
    return _mix((key + (position + 1) * _GOLDEN) & _MASK)


def hash_bits(key: int, index: int) -> int:
    """64 random bits for `index` under `key`."""
    return _mix((key + (index + 1) * _GOLDEN) & _MASK)


def uniform(key: int, index: int = 0) -> float:
    """A uniform number in (0, 1) with 53 bits."""
    return ((hash_bits(key, index) >> 11) + 0.5) * 2.0**-53


def gumbel(key: int, index: int) -> float:
    """A standard Gumbel number, -log(-log(uniform))."""
    return -math.log(-math.log(uniform(key, index)))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def gumbel_tensor(key: int, index: Tensor) -> Tensor:
    """`gumbel` for a tensor of int64 indices, float64 of the same shape and device."""
    z = (index + 1) * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_MUL1)
    z = (z ^ _shift(z, 27)) * _signed(_MUL2)
    z = z ^ _shift(z, 31)
    u = (_shift(z, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(u))
