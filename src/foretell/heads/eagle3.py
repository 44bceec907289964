"""EAGLE-3 head (Li et al. 2025): states of three layers fused, a layer of its own, a reduced vocabulary.

Layouts that load: SafeAILab and SpecForge (`midlayer.*`), AngelSlim and speculators (`layers.0.*`, the
latter with its nested config.json). Flags: `norm_before_residual`; `norm_before_fc` (one norm over the
concatenated states) and `fc_norm` (one per state, EAGLE-3.1); `norm_output` (the normed output is fed
back).

Layer ids follow one of two conventions: "the input of layer X" (2, L/2, L - 3 by default) or "the output
of layer X" (one less each). speculators writes the first, `eagle_config` of the others the second; the
default ids tell themselves apart.

Shape suffixes: T rows, R rows whose logits are wanted, W hidden width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.checkpoint import KIND, check_kind, configured, fill, open_folder
from foretell.heads.layers import (
    Attention,
    Block,
    BlockConfig,
    Projection,
    RmsNorm,
    Slot,
    block_config,
)
from foretell.heads.vocabulary import MAPS, read_target_ids
from foretell.models.weights import Checkpoint
from foretell.types import Needs

CONVENTIONS = ("auto", "input", "output")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape and flags of an EAGLE-3 head.

    Args:
        block: its layer.
        target_hidden: width of the target's states.
        vocab_size: of its logits.
        embedding_rows: of its own embedding; 0 = it uses the target's.
        aux_layers: the states that it fuses, by the layer that they enter.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: see above.
        at: name of its layer in the checkpoint.
    """

    block: BlockConfig
    target_hidden: int
    vocab_size: int
    embedding_rows: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    at: str = "midlayer."


class Eagle3Head(nn.Module):
    """See `FeatureHead`."""

    zero_first = False

    def __init__(self, config: Eagle3Config, target_ids: Tensor | None = None) -> None:
        super().__init__()
        block, fused = config.block, config.target_hidden * len(config.aux_layers)
        self.config, self.target_ids = config, target_ids
        self.needs = Needs(aux_layers=tuple(sorted(set(config.aux_layers))))
        self.embedding = nn.Embedding(config.embedding_rows, block.hidden) if config.embedding_rows else None
        self.input_norm = RmsNorm(fused, block.eps) if config.norm_before_fc else None
        parts = len(config.aux_layers) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RmsNorm(config.target_hidden, block.eps) for _ in range(parts))
        self.fc = Projection(fused, {"fc": block.hidden})
        self.embed_norm = RmsNorm(block.hidden, block.eps)
        self.hidden_norm = RmsNorm(block.hidden, block.eps)
        self.block = Block(block, input_norm=False, attention=Attention(block, 2 * block.hidden))
        self.norm = RmsNorm(block.hidden, block.eps)
        self.lm_head = Projection(block.hidden, {"lm_head": config.vocab_size})
        self.heads, self.kv_heads, self.dim = block.heads, block.kv_heads, block.dim
        self.scale, self.window = block.dim**-0.5, block.window
        self.rope, self.rotated, self.max_context = block.rope, block.rotated, block.max_context

    def features(self, hidden_TW: Tensor | None, aux_TW: Mapping[int, Tensor]) -> Tensor:
        """The fused states, in the order of the configuration: low, middle, high."""
        parts = [aux_TW[layer] for layer in self.config.aux_layers]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        fused_TF = torch.cat(parts, -1)
        if self.input_norm is not None:
            fused_TF = self.input_norm(fused_TF)
        out_TW: Tensor = self.fc(fused_TF)
        return out_TW

    def joined(self, embed_TW: Tensor, feature_TW: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feature, and both normed for attention."""
        normed_TW = self.hidden_norm(feature_TW)
        residual_TW = normed_TW if self.config.norm_before_residual else feature_TW
        both_TF = torch.cat([self.embed_norm(embed_TW), normed_TW], -1)
        return residual_TW, both_TF

    def feedback(self, out_TW: Tensor) -> Tensor:
        """The output itself, or normed with `norm_output`."""
        return self.normed(out_TW) if self.config.norm_output else out_TW

    def logits(self, out_RW: Tensor) -> Tensor | None:
        """Over the reduced vocabulary."""
        logits_RV: Tensor = self.lm_head(self.normed(out_RW)).float()
        return logits_RV

    def normed(self, out_RW: Tensor) -> Tensor:
        """After the head's own final norm."""
        normed_RW: Tensor = self.norm(out_RW)
        return normed_RW

    def slots(self) -> Iterator[Slot]:
        """The published tensors, but for the vocabulary maps."""
        at = self.config.at
        if self.embedding is not None:
            yield Slot("embed_tokens.weight", self.embedding.weight, 0, len(self.embedding.weight))
        if self.input_norm is not None:
            yield from self.input_norm.slots("input_norm")
        for index, norm in enumerate(self.fc_norm):
            assert isinstance(norm, RmsNorm)
            yield from norm.slots(f"fc_norm.{index}")
        yield from self.fc.slots()
        yield from self.embed_norm.slots(f"{at}input_layernorm")
        yield from self.hidden_norm.slots(f"{at}hidden_norm")
        yield from self.block.slots(at)
        yield from self.norm.slots("norm")
        yield from self.lm_head.slots()


def load_eagle3(
    folder: Path, num_layers: int, hidden_size: int, vocab_size: int, convention: str = "auto"
) -> Eagle3Head:
    """An EAGLE-3 checkpoint for a target of these measures.

    Args:
        convention: what the configuration's layer ids mean: "input", "output", or "auto".

    Raises:
        InputError: it is damaged, or does not fit its configuration or the target.
    """
    config, checkpoint = open_folder(folder)
    check_kind(folder, config, "eagle3")
    target_ids = read_target_ids(checkpoint, vocab_size)
    flags = _flat(folder, config)
    aux = _aux_layers(folder, flags, num_layers, convention)
    head = configured(
        folder,
        lambda: Eagle3Head(_configuration(flags, checkpoint, hidden_size, aux), target_ids),
    )
    width = head.config.block.hidden
    rows = head.config.embedding_rows
    if head.config.target_hidden != hidden_size or (not rows and width != hidden_size):
        raise InputError(
            f"{folder} is a head for states of {head.config.target_hidden} (itself {width} wide), the "
            f"target's hidden size is {hidden_size}"
        )
    if rows and rows < vocab_size:
        raise InputError(f"{folder}: its embedding has {rows} rows, the target's vocabulary {vocab_size}")
    held = len(target_ids) if target_ids is not None else vocab_size
    if target_ids is not None and held != head.config.vocab_size:
        raise InputError(f"{folder}: d2t has {held} entries, draft_vocab_size is {head.config.vocab_size}")
    if target_ids is None and head.config.vocab_size > vocab_size:
        raise InputError(
            f"{folder} drafts {head.config.vocab_size} ids, the target has {vocab_size}, and there is no d2t"
        )
    return fill(head, head.slots, checkpoint, ignore=MAPS)


def _flat(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """speculators nests the layer's configuration, others the flags."""
    for name in ("transformer_layer_config", "eagle_config"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise InputError(f"{folder}/config.json: {name} must be an object, got {config[name]!r}")
    layer = config.get("transformer_layer_config") or {}
    return {
        **layer,
        **(config.get("eagle_config") or {}),
        **{k: v for k, v in config.items() if v is not None},
    }


def _configuration(
    flags: Mapping[str, Any], checkpoint: Checkpoint, hidden_size: int, aux: tuple[int, ...]
) -> Eagle3Config:
    own = "embed_tokens.weight" in checkpoint
    biased = bool(flags.get("attention_bias", False))
    return Eagle3Config(
        block=block_config(flags, qkv_bias=biased, qk_norm=any("q_norm" in name for name in checkpoint)),
        target_hidden=int(flags.get("target_hidden_size") or hidden_size),
        vocab_size=int(flags.get("draft_vocab_size") or flags["vocab_size"]),
        embedding_rows=checkpoint.shape("embed_tokens.weight")[0] if own else 0,
        aux_layers=aux,
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_before_fc=bool(flags.get("norm_before_fc", False)),
        fc_norm=bool(flags.get("fc_norm", False)),
        norm_output=bool(flags.get("norm_output", False)),
        at="layers.0." if any(name.startswith("layers.0.") for name in checkpoint) else "midlayer.",
    )


def _aux_layers(folder: Path, flags: Mapping[str, Any], layers: int, convention: str) -> tuple[int, ...]:
    """The fused states by the layer that they enter."""
    default = (2, layers // 2, layers - 3)
    given: Sequence[int] | None = flags.get("eagle_aux_hidden_state_layer_ids")
    whole = isinstance(given, list) and all(isinstance(layer, int) for layer in given)
    if given is not None and not whole:
        name = "eagle_aux_hidden_state_layer_ids"
        raise InputError(f"{folder}/config.json: {name} must be a list of layers, got {given!r}")
    ids = default if given is None else tuple(int(layer) for layer in given)
    if given is None or ids == default:
        return _within(folder, ids if convention != "output" else tuple(i + 1 for i in ids), layers)
    shifted = tuple(layer + 1 for layer in ids)
    if convention == "auto":
        names_inputs = KIND in flags or ("speculators_model_type" in flags and shifted != default)
        convention = "input" if names_inputs else "output"
    return _within(folder, ids if convention == "input" else shifted, layers)


def _within(folder: Path, ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    if not ids or not all(0 <= layer <= layers for layer in ids):
        raise InputError(
            f"{folder} reads the inputs of layers {list(ids)}, the target has {layers} layers",
            hint="if its ids mean something else, set the option layer_ids to input or output",
        )
    return ids
