"""The engine: scheduling, the step, text and stops."""

from foretell.engine.engine import Engine
from foretell.engine.request import Chunk, Request, TokenLogprob

__all__ = ["Chunk", "Engine", "Request", "TokenLogprob"]
