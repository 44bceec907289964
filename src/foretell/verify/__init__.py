"""Acceptance rules: which draft tokens the target keeps, and which token comes next."""

from foretell.noise import Stream
from foretell.registry import Registry
from foretell.verify import block, coupled, rejection, typical
from foretell.verify.base import Draws, Rule, Target

__all__ = ["RULES", "Draws", "Rule", "Target"]

_ALL = (
    Rule(
        "coupled", coupled.verify, True, Stream.TARGET, False, "same seed, same text as without speculation"
    ),
    Rule(
        "rejection",
        rejection.verify,
        True,
        Stream.DRAFT,
        True,
        "exact in distribution: accept with min(1, p/q)",
    ),
    Rule("block", block.verify, True, Stream.DRAFT, True, "exact in distribution: judges a chain as a whole"),
    Rule(
        "typical", typical.verify, False, Stream.DRAFT, False, "LOSSY: keeps what the target finds plausible"
    ),
)
RULES = Registry("verification rule", {rule.name: rule for rule in _ALL})
