"""A loaded model becomes one whose KV cache is spread over ranks."""

from __future__ import annotations

import sys
from dataclasses import replace

from foretell.errors import InputError
from foretell.models.base import TargetModel
from foretell.models.load import LoadedModel
from foretell.parallel.model import ShardedModel
from foretell.parallel.team import TIMEOUT, Team, identity, under_torchrun


def ranks_of(model: TargetModel) -> int:
    """How many ranks hold the model's KV cache."""
    return model.ranks if isinstance(model, ShardedModel) else 1


def spread(loaded: LoadedModel, ranks: int, timeout: float = TIMEOUT) -> LoadedModel:
    """The model over several ranks: those of torchrun, else processes that are started now.

    On other ranks than 0 this does not return; see `Team.share`.

    Args:
        timeout: seconds that a rank may take for its part of an exchange.

    Raises:
        InputError: it is spread already, or the ranks differ from each other.
        RankError: they do not come together.
    """
    model = loaded.model
    if isinstance(model, ShardedModel):
        raise InputError("the loaded model is spread over ranks already", hint="leave out context_parallel")
    command = None
    if under_torchrun():
        team, command = Team.join(model.device, timeout), sys.argv[1:]
    elif model.device.type == "cuda":
        raise InputError(
            f"context_parallel on {model.device} needs a process per device",
            hint="start the ranks with torchrun",
        )
    else:
        how = {"name": str(loaded.folder), "device": str(model.device), "impl": model.impl}
        how |= {"weights": model.weights}
        team = Team.start(ranks, {**how, "allow_untested": model.impl == "hf"}, timeout)
    team.compare(identity(model, command))
    return replace(loaded, model=team.share(model))
