"""New heads for a target: their shapes, where they begin, and what trains them by default.

Shape suffixes: V draft vocabulary, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.heads.eagle import EagleHead
from foretell.heads.eagle3 import Eagle3Config, Eagle3Head
from foretell.heads.layers import Block, block_config
from foretell.heads.medusa import MedusaHeads
from foretell.heads.mtp import DEEPSEEK, MtpHead, measures_of
from foretell.registry import Registry
from foretell.train.decoder import DistilObjective, SmallDecoder
from foretell.train.losses import TokenLoss
from foretell.train.objective import FeatureObjective, MedusaObjective, Objective, Teacher, Weights
from foretell.train.warm import begin_at_last_layer

Config = Mapping[str, Any]
_INPUT_NORM = "model.layers.{}.input_layernorm"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a new head is made for.

    Args:
        target: the target's config.json.
        layers: of the target.
        inner: width of the head's MLP; None = the target's.
        draft_vocab: size of the draft vocabulary.
        heads, depth: MEDUSA's heads, and residual blocks of each.
        folder: the target's checkpoint, to begin from; None = random weights.
        small: layers, width and query heads of a small decoder.
    """

    target: Config
    layers: int
    inner: int | None
    draft_vocab: int
    heads: int = 4
    depth: int = 1
    small: tuple[int, int, int] = (4, 192, 3)
    folder: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        """config.json of a head of one layer."""
        known = {
            name: self.target[name]
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "rope_theta",
                "rope_scaling",
                "rope_parameters",
                "max_position_embeddings",
                "vocab_size",
            )
            if self.target.get(name) is not None
        }
        if self.inner is not None:
            known["intermediate_size"] = self.inner
        return {**known, "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kind of head is trained.

    Args:
        make: a new head, with weights to begin from.
        config: its config.json.
        weights: defaults of the objective.
        rate: learning rate.
        objective: its class.
        model: it is a model of its own: it says everything, and has the target's tokenizer beside it.
    """

    make: Callable[[Shape, Tensor], nn.Module]
    config: Callable[[Shape], dict[str, Any]]
    weights: Weights
    rate: float
    objective: Callable[[Any, Teacher, Weights, TokenLoss], Objective]
    model: bool = False


def _begin(head: nn.Module) -> None:
    """Weights as transformers draws them."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def aux_layers(layers: int) -> tuple[int, int, int]:
    """The states that EAGLE-3 fuses, by the layer that they enter.

    Raises:
        InputError: the target has too few layers for three different ones.
    """
    chosen = (min(2, layers // 2), layers // 2, max(layers // 2, layers - 3))
    if layers < 2:
        raise InputError(f"an EAGLE-3 head reads states of three depths, the target has {layers} layers")
    return chosen


def _eagle3(shape: Shape, head_VW: Tensor) -> nn.Module:
    config = Eagle3Config(
        block=block_config(shape.config),
        target_hidden=int(shape.target["hidden_size"]),
        vocab_size=shape.draft_vocab,
        embedding_rows=0,
        aux_layers=aux_layers(shape.layers),
    )
    head = Eagle3Head(config)
    _begin(head)
    with torch.no_grad():
        head.lm_head.weight.copy_(head_VW)
    if shape.folder is not None:
        norms = {"midlayer.hidden_norm": _INPUT_NORM.format(shape.layers - 1), "norm": "model.norm"}
        begin_at_last_layer(head, shape.folder, shape.layers, at="midlayer.", norms=norms, fuse=head.fc)
    return head


def _eagle3_config(shape: Shape) -> dict[str, Any]:
    return {
        **shape.config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target["hidden_size"],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers(shape.layers)),
        },
    }


def _eagle(shape: Shape, head_VW: Tensor) -> nn.Module:
    head = EagleHead(block_config(shape.config), fc_bias=False)
    _begin(head)
    with torch.no_grad():  # the next state begins as the one before
        head.fc.weight[:, head.fc.out_features :] += torch.eye(head.fc.out_features)
    return head


def _eagle_config(shape: Shape) -> dict[str, Any]:
    return {**shape.config, "architectures": ["LlamaForCausalLMEagle"], "bias": False}


def _mtp(shape: Shape, head_VW: Tensor) -> nn.Module:
    block = block_config(shape.config)
    head = MtpHead(DEEPSEEK, Block(block), measures_of(block), block.hidden, block.eps, 0, 0)
    _begin(head)
    if shape.folder is not None:
        norms = {"input_layernorm": _INPUT_NORM.format(shape.layers - 1), "shared_head.norm": "model.norm"}
        begin_at_last_layer(head, shape.folder, shape.layers, at="", norms=norms, fuse=head.fuse)
    return head


def _mtp_config(shape: Shape) -> dict[str, Any]:
    return {
        **shape.config,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
    }


def _medusa(shape: Shape, head_VW: Tensor) -> nn.Module:
    """Residual blocks begin as the identity (MEDUSA's own rule)."""
    heads = MedusaHeads(int(shape.target["hidden_size"]), shape.heads, shape.depth)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
    return heads


def _medusa_config(shape: Shape) -> dict[str, Any]:
    return {
        "medusa_num_heads": shape.heads,
        "medusa_num_layers": shape.depth,
        "hidden_size": shape.target["hidden_size"],
        "vocab_size": shape.target["vocab_size"],
    }


def _draft(shape: Shape, head_VW: Tensor) -> nn.Module:
    decoder = SmallDecoder(
        block_config(_draft_config(shape)), shape.small[0], int(shape.target["vocab_size"])
    )
    _begin(decoder)
    nn.init.normal_(decoder.embedding.weight, std=0.02)
    return decoder


def _draft_config(shape: Shape) -> dict[str, Any]:
    layers, hidden, heads = shape.small
    known = shape.config
    if hidden % (2 * heads):
        raise InputError(f"width must be a multiple of twice the {heads} query heads, got {hidden}")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **known,
        **{name: shape.target[name] for name in ids if name in shape.target},
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": shape.inner or 8 * hidden // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": True,
    }


RECIPES: Registry[Recipe] = Registry(
    "head",
    {
        "medusa": Recipe(_medusa, _medusa_config, Weights(decay=0.8), 1e-3, MedusaObjective),
        "eagle": Recipe(
            _eagle, _eagle_config, Weights(token=0.1, state=1.0, noise=0.1), 1e-3, FeatureObjective
        ),
        "eagle3": Recipe(_eagle3, _eagle3_config, Weights(depths=7, decay=0.8), 2e-3, FeatureObjective),
        "draft": Recipe(_draft, _draft_config, Weights(), 1e-3, DistilObjective, model=True),
        "mtp": Recipe(_mtp, _mtp_config, Weights(depths=3, decay=0.6), 2e-3, FeatureObjective),
    },
)
