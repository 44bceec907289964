"""foretell: large language models that answer faster without changing what they say.

`LLM` and `SamplingParams` are the library; they are imported on first use, so that the command line
answers before torch is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.api import LLM, Completion
    from foretell.types import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {"LLM": "foretell.api", "Completion": "foretell.api", "SamplingParams": "foretell.types"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretell' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
