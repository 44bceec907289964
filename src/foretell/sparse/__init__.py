"""Which keys a pass reads where it does not read all of them: signals, selection policies, the reader."""

from foretell.sparse.lookahead import Heads, draft_mass, spread_layers, watching
from foretell.sparse.policies import KV_CHOICES, POLICIES, Policy, select
from foretell.sparse.reader import KVReader
from foretell.sparse.signals import Signals, attention_mass

__all__ = [
    "KV_CHOICES",
    "POLICIES",
    "Heads",
    "KVReader",
    "Policy",
    "Signals",
    "attention_mass",
    "draft_mass",
    "select",
    "spread_layers",
    "watching",
]
