"""Acceptance rules: which draft tokens the target keeps, and which token comes next."""

from foretell.noise import Stream
from foretell.registry import Registry
from foretell.verify.base import Draws, Rule, Target
from foretell.verify.block import block
from foretell.verify.coupled import coupled
from foretell.verify.rejection import rejection

__all__ = ["RULES", "Draws", "Rule", "Target"]

RULES = Registry(
    "verification rule",
    {
        rule.name: rule
        for rule in (
            Rule("coupled", coupled, True, Stream.TARGET, "same seed, same text as without speculation"),
            Rule(
                "rejection", rejection, True, Stream.DRAFT, "exact in distribution: accept with min(1, p/q)"
            ),
            Rule("block", block, True, Stream.DRAFT, "exact in distribution: judges a chain as a whole"),
        )
    },
)
