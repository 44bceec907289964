"""Which keys a pass reads where it does not read all of them: signals, selection policies, the reader."""

from foretell.sparse.policies import KV_CHOICES, POLICIES, Policy, select
from foretell.sparse.reader import KVReader, Reader
from foretell.sparse.signals import Signals, attention_mass

__all__ = ["KV_CHOICES", "POLICIES", "KVReader", "Policy", "Reader", "Signals", "attention_mass", "select"]
