"""Acceptance rules: which draft tokens the target keeps, and which token comes next."""

from foretell.noise import Stream
from foretell.registry import Registry
from foretell.verify import block, coupled, rejection, typical
from foretell.verify.base import Draws, Rule, Target

__all__ = ["RULES", "Draws", "Rule", "Target"]

_ALL = (
    Rule(
        name="coupled",
        verify=coupled.verify,
        lossless=True,
        draft_stream=Stream.TARGET,
        needs_q=False,
        invariant=True,
        draws=True,
        about="same seed, same text as without speculation",
    ),
    Rule(
        name="rejection",
        verify=rejection.verify,
        lossless=True,
        draft_stream=Stream.DRAFT,
        needs_q=True,
        invariant=False,
        draws=True,
        about="exact in distribution: accept with min(1, p/q)",
    ),
    Rule(
        name="block",
        verify=block.verify,
        lossless=True,
        draft_stream=Stream.DRAFT,
        needs_q=True,
        invariant=False,
        draws=True,
        about="exact in distribution: judges a chain as a whole",
    ),
    Rule(
        name="typical",
        verify=typical.verify,
        lossless=False,
        draft_stream=Stream.DRAFT,
        needs_q=False,
        invariant=False,
        draws=False,
        about="LOSSY: keeps what the target finds plausible",
    ),
)
RULES = Registry("verification rule", {rule.name: rule for rule in _ALL})
