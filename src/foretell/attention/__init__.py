"""Attention over the KV arena: packing, masks, the one `attend`."""

from foretell.attention.attend import attend
from foretell.attention.batch import Batch, Segment, pack

__all__ = ["Batch", "Segment", "attend", "pack"]
