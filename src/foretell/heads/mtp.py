"""Multi-token prediction modules that models bring along: DeepSeek-V3, Qwen3-Next, MiMo.

One module joins the embedding of token t + 1 with the target's last hidden state at t (after its final
norm) and runs one decoder layer. It is applied again to its own output for drafts of more than one token.
The families differ in names, in the order of the two parts, in their norms, and in what is fed back: the
layer's output (DeepSeek), or that after the module's final norm (Qwen3-Next, MiMo).

Shape suffixes: T rows, R rows whose output is wanted, W hidden width, V vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import check_kind, configured, fill, open_folder
from foretell.heads.eagle import check_width
from foretell.heads.experts import Experts, deepseek_experts, qwen_experts
from foretell.heads.latent import LatentAttention, latent_config, latent_scale
from foretell.heads.layers import Block, BlockConfig, Projection, RmsNorm, Slot, block_config
from foretell.heads.vocabulary import read_target_ids
from foretell.models.config import Rope
from foretell.models.weights import Checkpoint
from foretell.types import Needs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How a family names and orders the parts of its module.

    Args:
        embed_norm, hidden_norm, fuse, final_norm: names below the module.
        block: name of its decoder layer below the module, with a dot, or "".
        embedding, head: names of an embedding and output head of its own, where they are stored.
        hidden_first: whether the hidden state comes before the embedding.
        normed_feedback: whether the next step reads the output after the final norm.
        offset: norms multiply with 1 + weight.
        zero_first: whether the embedding at position 0 is zero.
    """

    embed_norm: str
    hidden_norm: str
    fuse: str
    final_norm: str
    block: str = ""
    embedding: str = ""
    head: str = ""
    hidden_first: bool = False
    normed_feedback: bool = True
    offset: bool = False
    zero_first: bool = False


DEEPSEEK = MtpLayout(
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    embedding="embed_tokens",
    head="shared_head.head",
    normed_feedback=False,
    zero_first=True,
)
QWEN3_NEXT = MtpLayout(
    "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.", offset=True
)
MIMO = MtpLayout(
    "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True, zero_first=True
)


class MtpHead(nn.Module):
    """See `FeatureHead`.

    Args:
        layout: the family.
        block: its decoder layer.
        measures: shape, scale, rope and context of its attention, by the names of `FeatureHead`.
        hidden, eps: width, and epsilon of the norms.
        embedding_rows, head_rows: of an embedding and an output head of its own; 0 = the target's.
    """

    needs = Needs(last_hidden=True)
    target_ids: Tensor | None = None
    window: int | None = None
    heads: int
    kv_heads: int
    dim: int
    scale: float
    rope: Rope
    rotated: int
    max_context: int

    def __init__(
        self,
        layout: MtpLayout,
        block: Block,
        measures: Mapping[str, Any],
        hidden: int,
        eps: float,
        embedding_rows: int,
        head_rows: int,
    ) -> None:
        super().__init__()
        self.layout, self.zero_first = layout, layout.zero_first
        self.embed_norm = RmsNorm(hidden, eps, layout.offset)
        self.hidden_norm = RmsNorm(hidden, eps, layout.offset)
        self.fuse = Projection(2 * hidden, {layout.fuse: hidden})
        self.block = block
        self.final_norm = RmsNorm(hidden, eps, layout.offset)
        self.embedding = nn.Embedding(embedding_rows, hidden) if embedding_rows else None
        self.head = Projection(hidden, {layout.head: head_rows}) if head_rows else None
        for name, value in measures.items():
            setattr(self, name, value)

    def features(self, hidden_TW: Tensor | None, aux_TW: Mapping[int, Tensor]) -> Tensor:
        """The last hidden states."""
        assert hidden_TW is not None
        return hidden_TW

    def joined(self, embed_TW: Tensor, feature_TW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both normed, side by side and fused."""
        parts = [self.embed_norm(embed_TW), self.hidden_norm(feature_TW)]
        if self.layout.hidden_first:
            parts.reverse()
        fused_TW: Tensor = self.fuse(torch.cat(parts, -1))
        return fused_TW, None

    def feedback(self, out_TW: Tensor) -> Tensor:
        """See `MtpLayout.normed_feedback`."""
        return self.normed(out_TW) if self.layout.normed_feedback else out_TW

    def logits(self, out_RW: Tensor) -> Tensor | None:
        """Of its own head where it has one."""
        if self.head is None:
            return None
        logits_RV: Tensor = self.head(self.normed(out_RW)).float()
        return logits_RV

    def normed(self, out_RW: Tensor) -> Tensor:
        """After the module's final norm."""
        normed_RW: Tensor = self.final_norm(out_RW)
        return normed_RW

    def slots(self) -> Iterator[Slot]:
        """The module's tensors, without the prefix that it has in a model."""
        layout = self.layout
        yield from self.embed_norm.slots(layout.embed_norm)
        yield from self.hidden_norm.slots(layout.hidden_norm)
        yield from self.fuse.slots()
        yield from self.block.slots(layout.block)
        yield from self.final_norm.slots(layout.final_norm)
        if self.embedding is not None:
            yield Slot(f"{layout.embedding}.weight", self.embedding.weight, 0, len(self.embedding.weight))
        if self.head is not None:
            yield from self.head.slots()


def has_mtp(folder: Path) -> bool:
    """Whether a model's checkpoint brings an MTP module along.

    Raises:
        InputError: its configuration cannot be used.
    """
    whole, checkpoint = open_folder(folder)
    return _find(_text_config(folder, whole), checkpoint) is not None


def _text_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with that of the text model where a model has several."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise InputError(f"{folder}/config.json: text_config must be an object, got {text!r}")
    both = {**config, **text}
    layers = both.get("num_hidden_layers", 0)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise InputError(f"{folder}/config.json: num_hidden_layers must be an integer, got {layers!r}")
    return both


def load_mtp(folder: Path, hidden_size: int, vocab_size: int) -> MtpHead:
    """The first MTP module in a folder: a model's own, or one saved alone under the same names.

    Raises:
        InputError: there is none, it is damaged, or it does not fit its configuration or the target.
    """
    whole, checkpoint = open_folder(folder)
    config = _text_config(folder, whole)
    check_kind(folder, config, "mtp")
    if config.get("quantization_config"):
        raise InputError(f"{folder}: the MTP module is quantised (quantization_config), which is not read")
    check_width(folder, config, hidden_size)
    layout, prefix, more = _family(folder, config, checkpoint)
    if any(name.startswith(more) for name in checkpoint):
        _log.warning("%s has several MTP modules; the first drafts every token", folder)
    stored = {
        part: checkpoint.shape(f"{prefix}{part}.weight")[0] if f"{prefix}{part}.weight" in checkpoint else 0
        for part in (layout.embedding, layout.head)
        if part
    }
    for part, rows in stored.items():
        if rows and rows != vocab_size:
            raise InputError(
                f"{folder}: {prefix}{part} has {rows} rows, the target's vocabulary {vocab_size}"
            )
    rows_of = (stored.get(layout.embedding, 0), stored.get(layout.head, 0))
    head = configured(folder, lambda: _build(layout, config, *rows_of))
    if not stored.get(layout.head):
        head.target_ids = read_target_ids(checkpoint, vocab_size)
    ignore = rf"(?!{re.escape(prefix)})|{re.escape(more)}"
    return fill(head, head.slots, checkpoint, rename=lambda name: prefix + name, ignore=ignore)


_Family = tuple[MtpLayout, str, str]  # the layout, the module's prefix, the prefix of a second module


def _families(config: Mapping[str, Any]) -> tuple[_Family, ...]:
    layers = int(config.get("num_hidden_layers") or 0)
    return (
        (QWEN3_NEXT, "mtp.", "mtp.layers.1."),
        (MIMO, "model.mtp_layers.0.", "model.mtp_layers.1."),
        (DEEPSEEK, f"model.layers.{layers}.", f"model.layers.{layers + 1}."),
    )


def _find(config: Mapping[str, Any], checkpoint: Checkpoint) -> _Family | None:
    for layout, prefix, more in _families(config):
        if f"{prefix}{layout.fuse}.weight" in checkpoint:
            return layout, prefix, more
    return None


def _family(folder: Path, config: Mapping[str, Any], checkpoint: Checkpoint) -> _Family:
    if (found := _find(config, checkpoint)) is not None:
        return found
    known = ", ".join(f"{prefix}{layout.fuse}.weight" for layout, prefix, _ in _families(config))
    raise InputError(f"{folder} has no MTP module (none of {known})")


def _build(layout: MtpLayout, config: Mapping[str, Any], embedding_rows: int, head_rows: int) -> MtpHead:
    latent = layout is DEEPSEEK and "kv_lora_rank" in config
    flags: dict[str, Any] = {"offset": layout.offset, "window": None}
    if layout is QWEN3_NEXT:
        flags |= {"qk_norm": True, "gated": True}
    if layout is MIMO:
        flags |= {"qkv_bias": True, "out_bias": False}
    shape = block_config(config, **flags)
    experts = None
    if layout is QWEN3_NEXT and int(config.get("num_experts") or 0):
        experts = Experts(qwen_experts(config))
    if layout is DEEPSEEK and config.get("n_routed_experts"):
        experts = Experts(deepseek_experts(config))
    measures = measures_of(shape)
    attention = None
    if latent:
        wide = latent_config(config)
        attention = LatentAttention(wide)
        measures |= {
            "kv_heads": wide.heads,
            "dim": wide.dim,
            "rotated": wide.rotated,
            "scale": latent_scale(config),
        }
    block = Block(shape, attention=attention, mlp=experts)
    return MtpHead(layout, block, measures, shape.hidden, shape.eps, embedding_rows, head_rows)


def measures_of(shape: BlockConfig) -> dict[str, Any]:
    """What `MtpHead` is told of usual attention."""
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "dim": shape.dim,
        "scale": shape.dim**-0.5,
        "rotated": shape.rotated,
        "max_context": shape.max_context,
        "rope": shape.rope,
    }
