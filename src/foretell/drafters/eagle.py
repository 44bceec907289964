"""EAGLE-1, EAGLE-2 and EAGLE-3 drafters: the heads of `foretell.heads` with their trees."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from foretell.drafters.base import DrafterContext
from foretell.drafters.feature import FeatureDrafter, HeadRunner
from foretell.drafters.grow import BestFirst, Fixed, Shape, read_paths
from foretell.errors import InputError
from foretell.heads.base import FeatureHead
from foretell.heads.eagle import load_eagle
from foretell.heads.eagle3 import CONVENTIONS, load_eagle3
from foretell.heads.ready import check_form

_log = logging.getLogger(__name__)

_LIVE = 32  # drafts that the cache has room for at once

# the tree of EAGLE-1: 25 nodes, level sizes 4, 8, 8, 3, 2
EAGLE1_TREE = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """Options of drafters that run a head token by token.

    Args:
        depth: longest draft, in tokens.
        top_k: candidates that are followed per level, and followers of each.
        tree: "dynamic" (EAGLE-2: most confident first), "eagle1" (its fixed tree of 25 nodes), or a JSON
            file of paths.
        min_prob: draft only tokens with at least this confidence.
        weights: how its matrices are kept: stored, fp32, fp16, int8, or "auto": int8 where compiled code runs
            them. Rounding changes what is drafted, never what is said.
    """

    depth: int = 6
    top_k: int = 4
    tree: str = "dynamic"
    min_prob: float = 0.0
    weights: str = "auto"

    def __post_init__(self) -> None:
        for name in ("depth", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.min_prob <= 1:
            raise InputError(f"min_prob must be between 0 and 1, got {self.min_prob}")
        check_form(self.weights)


@dataclass(frozen=True, slots=True)
class Eagle3Options(FeatureOptions):
    """Options of the EAGLE-3 drafter.

    Args:
        depth: longest draft, in tokens.
        top_k: candidates that are followed per level, and followers of each.
        tree: "dynamic" (most confident first), "eagle1" (a fixed tree of 25 nodes), or a JSON file of
            paths.
        min_prob: draft only tokens with at least this confidence.
        weights: how its matrices are kept: stored, fp32, fp16, int8, or "auto": int8 where compiled code runs
            them. Rounding changes what is drafted, never what is said.
        layer_ids: what the checkpoint's layer ids mean: "input" of a layer, its "output", or "auto".
    """

    layer_ids: str = "auto"

    def __post_init__(self) -> None:
        FeatureOptions.__post_init__(self)
        if self.layer_ids not in CONVENTIONS:
            raise InputError(f"layer_ids must be one of {', '.join(CONVENTIONS)}, got {self.layer_ids!r}")


def feature_drafter(context: DrafterContext, head: FeatureHead, options: FeatureOptions) -> FeatureDrafter:
    """The drafter of a head as it was loaded.

    Raises:
        InputError: the tree cannot be read, or the weights cannot be kept so here.
    """
    shape, nodes, scratch = shape_of(options)
    slots = context.slots + _LIVE * scratch
    runner = HeadRunner(head, context.target, slots, options.weights)
    return FeatureDrafter(runner, shape, scratch, nodes, options.min_prob)


def shape_of(options: FeatureOptions) -> tuple[Shape, int, int]:
    """Shape of the tree, nodes that suit it, and rows that the head computes for it at most."""
    if options.tree == "dynamic":
        nodes = options.depth if options.top_k == 1 else 4 * options.top_k
        return BestFirst(options.depth, options.top_k), nodes, options.top_k * max(1, options.depth - 1)
    plain = type(options)()
    for name in ("depth", "top_k"):
        if getattr(options, name) != getattr(plain, name):
            _log.warning("%s has no effect: the tree is %s", name, options.tree)
    fixed = Fixed(EAGLE1_TREE if options.tree == "eagle1" else read_paths(Path(options.tree)))
    return fixed, len(fixed.paths), len(fixed.paths)


def build_eagle(context: DrafterContext, argument: str | None, options: FeatureOptions) -> FeatureDrafter:
    """See `DrafterEntry.build`."""
    target = context.target
    head = load_eagle(context.head_folder("eagle", argument), target.hidden_size, target.vocab_size)
    return feature_drafter(context, head, options)


def build_eagle3(context: DrafterContext, argument: str | None, options: Eagle3Options) -> FeatureDrafter:
    """See `DrafterEntry.build`."""
    target, folder = context.target, context.head_folder("eagle3", argument)
    head = load_eagle3(folder, target.num_layers, target.hidden_size, target.vocab_size, options.layer_ids)
    return feature_drafter(context, head, options)
