"""The multi-token prediction module that a model brings along, chained (`foretell.heads.mtp`)."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.drafters.base import DrafterContext
from foretell.drafters.eagle import FeatureOptions, feature_drafter
from foretell.drafters.feature import FeatureDrafter
from foretell.heads.mtp import has_mtp, load_mtp


@dataclass(frozen=True, slots=True)
class MtpOptions(FeatureOptions):
    """Options of the MTP drafter.

    Args:
        depth: longest draft, in tokens; the module was trained for the first, and is applied to its own
            output for the others.
        top_k: candidates that are followed per level, and followers of each.
        tree: "dynamic" (most confident first), "eagle1" (a fixed tree of 25 nodes), or a JSON file of
            paths.
        min_prob: draft only tokens with at least this confidence.
        weights: how its matrices are kept: stored, fp32, fp16, int8, or "auto": int8 where compiled code runs
            them. Rounding changes what is drafted, never what is said.
    """

    depth: int = 3
    top_k: int = 2


def build(context: DrafterContext, argument: str | None, options: MtpOptions) -> FeatureDrafter:
    """See `DrafterEntry.build`; see `DrafterContext.head_folder` for that without an argument."""
    target = context.target
    head = load_mtp(context.head_folder("mtp", argument, has_mtp), target.hidden_size, target.vocab_size)
    return feature_drafter(context, head, options)
