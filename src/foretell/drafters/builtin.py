"""The drafters that come with foretell: one line each."""

from __future__ import annotations

from foretell.drafters import draft_model, lookahead, ngram, none, suffix
from foretell.drafters.base import DrafterEntry
from foretell.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {
        "none": DrafterEntry(none.build, None, none.NoOptions, "plain decoding"),
        "ngram": DrafterEntry(
            ngram.build, None, ngram.NgramOptions, "repeats what followed the last tokens before"
        ),
        "suffix": DrafterEntry(
            suffix.build,
            None,
            suffix.SuffixOptions,
            "repeats what usually followed, in this and earlier answers",
        ),
        "lookahead": DrafterEntry(
            lookahead.build, None, lookahead.LookaheadOptions, "the target guesses its own future in parallel"
        ),
        "draft": DrafterEntry(draft_model.build, "MODEL", draft_model.DraftModelOptions, "a smaller model"),
    },
)
