"""Which keys a pass reads where it does not read all of them: signals, selection policies, the reader."""

from foretell.sparse.lookahead import Heads, draft_mass, spread_layers, watching
from foretell.sparse.policies import KV_CHOICES, POLICIES, Policy, goes_by_profile, select
from foretell.sparse.profile import ModelShape, Profile, choose, read_profile, shape_of
from foretell.sparse.reader import KVReader, Reader
from foretell.sparse.signals import Signals, add_attention, attention_mass

__all__ = [
    "KV_CHOICES",
    "POLICIES",
    "Heads",
    "KVReader",
    "ModelShape",
    "Policy",
    "Profile",
    "Reader",
    "Signals",
    "add_attention",
    "attention_mass",
    "choose",
    "draft_mass",
    "goes_by_profile",
    "read_profile",
    "select",
    "shape_of",
    "spread_layers",
    "watching",
]
