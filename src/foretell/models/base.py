"""What the engine asks of a model.

Shape suffixes: T packed rows, R rows whose logits are wanted, V vocabulary, W hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretell.attention import Batch, Queries
from foretell.cache import KVArena
from foretell.types import NO_NEEDS, Needs


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one pass computed.

    Args:
        logits_RV: float32 logits of `batch.logit_R`.
        hidden_TW: last hidden states after the final norm, if `needs.last_hidden`.
        aux_TW: residual stream entering each layer of `needs.aux_layers`, before its norm; the key
            `num_layers` is the stream that leaves the last layer.
        queries: rotated queries of each layer of `needs.queries`.
    """

    logits_RV: Tensor
    hidden_TW: Tensor | None = None
    aux_TW: Mapping[int, Tensor] = field(default_factory=dict)
    queries: Mapping[int, Queries] = field(default_factory=dict)


class TargetModel(Protocol):
    """A decoder-only language model over packed rows; the target, and a draft model too.

    Attributes:
        impl: which code runs the graph: "decoder" or "hf".
        weights: how its matrices are kept: "stored", "fp32", "fp16" or "int8".
        row_exact: the logits of a row are the same bits whatever rows are computed beside it.
        vocab_size: width of the logits; may exceed the tokenizer's vocabulary (padding).
        num_heads: query heads of a layer.
        max_context: positions that the model was made for.
        hidden_size: width of its hidden states.
        dtype: of hidden states and arithmetic.
    """

    impl: str
    weights: str
    row_exact: bool
    vocab_size: int
    num_layers: int
    num_heads: int
    max_context: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def new_arena(self, slots: int) -> KVArena:
        """An arena of this model's shape."""
        ...

    def forward(self, batch: Batch, needs: Needs = NO_NEEDS) -> ForwardOutput:
        """One pass; K and V of all rows are written into `batch.arena`."""
        ...

    def embed(self, token_T: Tensor) -> Tensor:
        """Rows of the token embedding [T, W], as a draft head reads them."""
        ...

    def head(self, hidden_RW: Tensor) -> Tensor:
        """float32 logits [R, V] of last hidden states (after the final norm)."""
        ...
