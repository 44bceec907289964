"""Finds what Dustin goes by for a pair of models: retrieval heads, layers, the look-ahead's share."""

from foretell.profiling.run import Outcome, Settings, find

__all__ = ["Outcome", "Settings", "find"]
