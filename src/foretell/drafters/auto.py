"""The default: what costs nothing, and the heads that the model brought along.

The suffix drafter is always there, because it drafts for microseconds; a module or heads in the target's
own checkpoint draft where it is not sure. How far any of them drafts is the planner's business.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from foretell.drafters import medusa, mtp, suffix
from foretell.drafters.base import Drafter, DrafterContext
from foretell.drafters.combine import CombinedDrafter
from foretell.errors import InputError
from foretell.heads.medusa import has_medusa
from foretell.heads.mtp import has_mtp

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """It has none."""


def build(context: DrafterContext, argument: str | None, options: AutoOptions) -> Drafter:
    """See `DrafterEntry.build`."""
    first = suffix.build(context, None, suffix.SuffixOptions())
    try:
        if context.folder is not None and has_mtp(context.folder):
            return CombinedDrafter(first, mtp.build(context, None, mtp.MtpOptions()))
        if context.folder is not None and has_medusa(context.folder):
            return CombinedDrafter(first, medusa.build(context, None, medusa.MedusaOptions()))
    except InputError as reason:
        # nobody asked for these heads; the model runs without them
        _log.warning("the draft heads in the model's checkpoint are not used: %s", reason)
    return first
