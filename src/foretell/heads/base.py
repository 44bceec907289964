"""What the drafter that runs a head over its own KV cache asks of it.

A feature head predicts the state after the next token from a token and the state before it. Its row i
takes token i + 1 and the feature of token i, at position i, and leads to token i + 2.

Shape suffixes: T rows, R rows whose output is wanted, W hidden width, V target vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from foretell.heads.layers import Angles, Attend, Block, Slot
from foretell.models.config import Rope
from foretell.types import Needs


class FeatureHead(Protocol):
    """A head with one decoder layer of its own.

    Attributes:
        needs: the target's states that `features` reads.
        kv_heads, dim: shape of its KV cache; `scale` of its scores, `window` or None.
        heads: query heads.
        rope, rotated: rotary embedding, and how many dimensions of a head turn.
        max_context: positions that it was made for.
        embedding: its own token embedding, or None: the target's.
        target_ids: target id of each of its logits [draft vocabulary], or None: the same ids.
        zero_first: whether the embedding at position 0 is zero.
        block: its decoder layer.
    """

    needs: Needs
    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    rope: Rope
    rotated: int
    max_context: int
    embedding: nn.Embedding | None
    target_ids: Tensor | None
    zero_first: bool
    block: Block

    def features(self, hidden_TW: Tensor | None, aux_TW: Mapping[int, Tensor]) -> Tensor:
        """Features [T, W] of tokens that the target has read, from the states that it `needs`."""
        ...

    def joined(self, embed_TW: Tensor, feature_TW: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the layer takes: the stream [T, W], and what its attention reads instead of that, or None."""
        ...

    def feedback(self, out_TW: Tensor) -> Tensor:
        """The feature [T, W] that stands for the target's in the next row of a draft."""
        ...

    def logits(self, out_RW: Tensor) -> Tensor | None:
        """Logits over the head's own vocabulary; None = the target's head on `normed`."""
        ...

    def normed(self, out_RW: Tensor) -> Tensor:
        """What the target's output head takes."""
        ...

    def slots(self) -> Iterator[Slot]:
        """Every tensor of the checkpoint."""
        ...


def layer_output(
    head: FeatureHead,
    embed_TW: Tensor,
    feature_TW: Tensor,
    angles: Angles,
    attend: Attend,
    wanted_R: Tensor | None = None,
) -> Tensor:
    """The layer's output [T, W], before any final norm, or of the wanted rows [R, W]; all rows give keys."""
    x_TW, input_TI = head.joined(embed_TW, feature_TW)
    out_RW: Tensor = head.block(x_TW, angles, attend, wanted_R, input_TI)
    return out_RW
