"""Attention over the KV arena: packing, masks, the one `attend`."""

from foretell.attention.attend import attend
from foretell.attention.batch import Batch, Queries, Segment, pack

__all__ = ["Batch", "Queries", "Segment", "attend", "pack"]
