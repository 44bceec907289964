"""The drafters that come with foretell: one line each."""

from __future__ import annotations

from foretell.drafters import (
    auto,
    draft_model,
    eagle,
    lookahead,
    medusa,
    mtp,
    ngram,
    none,
    sparse_target,
    suffix,
)
from foretell.drafters.base import DrafterEntry
from foretell.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {
        "auto": DrafterEntry(
            auto.build,
            None,
            auto.AutoOptions,
            "suffix, with the model's own heads or those that were trained for it, if any",
        ),
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
        "medusa": DrafterEntry(
            medusa.build,
            "[PATH]",
            medusa.MedusaOptions,
            "heads on the target that guess several tokens at once",
        ),
        "eagle": DrafterEntry(
            eagle.build_eagle,
            "[PATH]",
            eagle.FeatureOptions,
            "EAGLE-1/2: a layer that predicts the target's states",
        ),
        "eagle3": DrafterEntry(
            eagle.build_eagle3,
            "[PATH]",
            eagle.Eagle3Options,
            "EAGLE-3: a layer that reads three of the target's",
        ),
        "mtp": DrafterEntry(
            mtp.build, "[PATH]", mtp.MtpOptions, "a prediction module, such as the model was trained with"
        ),
        "self": DrafterEntry(
            sparse_target.build, None, sparse_target.SelfOptions, "the target itself, reading few of its keys"
        ),
        "draft": DrafterEntry(draft_model.build, "MODEL", draft_model.DraftModelOptions, "a smaller model"),
    },
)
