"""Attention over the KV arena: packing, masks, the one `attend`."""

from foretell.attention.attend import attend
from foretell.attention.batch import Batch, Elsewhere, Queries, Segment, pack

__all__ = ["Batch", "Elsewhere", "Queries", "Segment", "attend", "pack"]
