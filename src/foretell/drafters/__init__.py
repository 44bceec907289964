"""Drafters: where proposals come from. Adding one is a file, and a line in `builtin.py` or an entry point
(docs/add-a-drafter.md)."""

from foretell.drafters.base import (
    AttendingDrafter,
    BorrowingDrafter,
    Drafter,
    DrafterContext,
    DrafterEntry,
    DraftRequest,
    LayeredDrafter,
    Observed,
    ScoredDrafter,
    looks_ahead,
)
from foretell.drafters.builtin import DRAFTERS
from foretell.drafters.spec import all_drafters, build_drafter, options_of, parse, parse_entries

__all__ = [
    "DRAFTERS",
    "AttendingDrafter",
    "BorrowingDrafter",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "DrafterEntry",
    "LayeredDrafter",
    "Observed",
    "ScoredDrafter",
    "all_drafters",
    "build_drafter",
    "looks_ahead",
    "options_of",
    "parse",
    "parse_entries",
]
