"""The KV cache: slots, leases, prefix reuse."""

from foretell.cache.arena import KVArena
from foretell.cache.manager import KVCache, Lease

__all__ = ["KVArena", "KVCache", "Lease"]
