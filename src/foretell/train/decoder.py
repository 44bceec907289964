"""A small decoder to be distilled: Llama's layers, the target's tokenizer, a tied output head.

Shape suffixes: T rows of the batch, R rows that are judged, W hidden width, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import configured, fill, open_folder
from foretell.heads.layers import Block, BlockConfig, RmsNorm, Slot, block_config
from foretell.models.rope import RopeTable
from foretell.train.batch import Batch
from foretell.train.losses import TokenLoss
from foretell.train.objective import Judged, Meter, Teacher, Weights
from foretell.types import Needs


class SmallDecoder(nn.Module):
    """A Llama of its own width and depth over the target's vocabulary.

    Args:
        config: of its layers.
        layers: how many.
        vocab_size: the target's.
    """

    needs = Needs(last_hidden=True)
    target_ids: Tensor | None = None

    def __init__(self, config: BlockConfig, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.norm = RmsNorm(config.hidden, config.eps)

    def states(self, token_T: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Last hidden states [T, W] of texts behind each other."""
        position_T = torch.cat([torch.arange(size) for size in sizes])
        table = RopeTable(self.config.rope, self.config.rotated, torch.device("cpu"))
        cos_PD, sin_PD = table.upto(max(sizes))
        angles = cos_PD[position_T].to(token_T.device), sin_PD[position_T].to(token_T.device)
        x_TW = self.embedding(token_T)

        def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            parts = zip(*(part.split(list(sizes)) for part in (q_THD, k_TKD, v_TKD)), strict=True)
            return torch.cat([self._sample(*part) for part in parts])

        for block in self.blocks:
            x_TW = block(x_TW, angles, attend)
        out_TW: Tensor = self.norm(x_TW)
        return out_TW

    def _sample(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q_HTD, k_KTD, v_KTD = (part.transpose(0, 1)[None] for part in (q_THD, k_TKD, v_TKD))
        mixed_HTD = F.scaled_dot_product_attention(q_HTD, k_KTD, v_KTD, is_causal=True, enable_gqa=True)[0]
        return mixed_HTD.transpose(0, 1).flatten(1)

    def slots(self) -> Iterator[Slot]:
        """The tensors by transformers' names; the head is the embedding."""
        weight = self.embedding.weight
        yield Slot("model.embed_tokens.weight", weight, 0, len(weight))
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from block.slots(f"model.layers.{number}.")
        yield from self.norm.slots("model.norm")


def load_small(folder: Path, vocab_size: int) -> SmallDecoder:
    """A distilled decoder, to go on from.

    Raises:
        InputError: it is none, or of another vocabulary.
    """
    config, checkpoint = open_folder(folder)
    if (size := config.get("vocab_size")) != vocab_size:
        raise InputError(f"{folder} has a vocabulary of {size}, the target's is {vocab_size}")
    decoder = configured(
        folder,
        lambda: SmallDecoder(block_config(config), int(config["num_hidden_layers"]), vocab_size),
    )
    return fill(decoder, decoder.slots, checkpoint)


class DistilObjective:
    """The small decoder is to choose as the target does, after every token of the answers."""

    def __init__(self, decoder: SmallDecoder, teacher: Teacher, weights: Weights, loss: TokenLoss) -> None:
        self._decoder, self._teacher, self._weights, self._loss = decoder, teacher, weights, loss

    def __call__(self, batch: Batch, chance: torch.Generator) -> Judged:
        """The loss of a batch."""
        rows = batch.rows(-1)
        meter = Meter(self._teacher, self._loss, self._weights, batch, rows.at_R)
        states_TW = self._decoder.states(batch.token_T, batch.sizes)
        meter.add(0, rows, rows.at_R, states_TW[rows.at_R] @ self._decoder.embedding.weight.T)
        return meter.judged()
