"""EAGLE-1 and EAGLE-2 head (Li et al. 2024): predicts the target's next last hidden state.

Published layout of SafeAILab/EAGLE: `fc`, one decoder layer whose attention input has no norm, no final
norm, no output head (the target's reads the predicted state), an embedding that may be left out. The
feature is the target's last hidden state after its final norm.

Shape suffixes: T rows, R rows whose output is wanted, W hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import check_kind, configured, fill, open_folder
from foretell.heads.layers import Block, BlockConfig, Projection, Slot, block_config
from foretell.heads.vocabulary import MAPS, read_target_ids
from foretell.types import Needs


class EagleHead(nn.Module):
    """See `FeatureHead`.

    Args:
        config: shape of its layer.
        fc_bias: whether `fc` has a bias.
        vocab_size: rows of its own embedding; 0 = it uses the target's.
    """

    needs = Needs(last_hidden=True)
    zero_first = False
    target_ids: Tensor | None = None

    def __init__(self, config: BlockConfig, fc_bias: bool, vocab_size: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.hidden) if vocab_size else None
        self.fc = Projection(2 * config.hidden, {"fc": config.hidden}, fc_bias)
        self.block = Block(config, input_norm=False)
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.dim
        self.scale, self.window = config.dim**-0.5, config.window
        self.rope, self.rotated, self.max_context = config.rope, config.rotated, config.max_context

    def features(self, hidden_TW: Tensor | None, aux_TW: Mapping[int, Tensor]) -> Tensor:
        """The last hidden states."""
        assert hidden_TW is not None
        return hidden_TW

    def joined(self, embed_TW: Tensor, feature_TW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both fused; the layer's output are predicted last hidden states."""
        fused_TW: Tensor = self.fc(torch.cat([embed_TW, feature_TW], -1))
        return fused_TW, None

    def feedback(self, out_TW: Tensor) -> Tensor:
        """What was predicted is the next feature."""
        return out_TW

    def logits(self, out_RW: Tensor) -> Tensor | None:
        """None: the target's head reads the predicted state, its whole vocabulary or `target_ids`."""
        return None

    def normed(self, out_RW: Tensor) -> Tensor:
        """It stands for a state after the target's final norm already."""
        return out_RW

    def slots(self) -> Iterator[Slot]:
        """The published tensors."""
        if self.embedding is not None:
            yield Slot("embed_tokens.weight", self.embedding.weight, 0, len(self.embedding.weight))
        yield from self.fc.slots()
        yield from self.block.slots("layers.0.")


def load_eagle(folder: Path, hidden_size: int, vocab_size: int) -> EagleHead:
    """An EAGLE-1/2 checkpoint for a target of this width and vocabulary.

    Raises:
        InputError: it is damaged, or does not fit its configuration or the target.
    """
    config, checkpoint = open_folder(folder)
    check_kind(folder, config, "eagle")
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise InputError(f"{folder}: an EAGLE head has one layer, config.json says {layers!r}")
    check_width(folder, config, hidden_size)
    own = "embed_tokens.weight" in checkpoint
    rows = checkpoint.shape("embed_tokens.weight")[0] if own else 0
    if own and rows < vocab_size:
        raise InputError(f"{folder}: its embedding has {rows} rows, the target's vocabulary {vocab_size}")
    biased = str(config.get("model_type", "")) == "qwen2" or bool(config.get("attention_bias", False))
    head = configured(
        folder,
        lambda: EagleHead(
            block_config(config, qkv_bias=biased, out_bias=bool(config.get("attention_bias", False))),
            bool(config.get("bias", True)),
            rows,
        ),
    )
    head.target_ids = read_target_ids(checkpoint, vocab_size)
    return fill(head, head.slots, checkpoint, ignore=MAPS)


def check_width(folder: Path, config: Mapping[str, Any], hidden_size: int) -> None:
    """The head's hidden width must be the target's.

    Raises:
        InputError: it is another.
    """
    width = config.get("hidden_size")
    if width != hidden_size:
        raise InputError(f"{folder} is a head for a hidden size of {width}, the target's is {hidden_size}")
