"""A loaded model over several ranks: those of torchrun, or processes that are started here."""

from __future__ import annotations

import sys
from dataclasses import replace

from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.parallel.model import ShardedModel
from foretell.parallel.team import Team, identity, under_torchrun


def share(loaded: LoadedModel, ranks: int, timeout: float) -> LoadedModel:
    """The model over several ranks; on other ranks than 0 this never returns.

    Raises:
        InputError: it is spread already, or a rank differs in what must be equal.
        RankError: the ranks do not come together.
    """
    model = loaded.model
    if isinstance(model, ShardedModel):
        raise InputError("the loaded model is spread over ranks already", hint="leave out context_parallel")
    if under_torchrun():
        team, command = Team.join(timeout), sys.argv[1:]
    else:
        again = {"name": str(loaded.folder), "device": str(model.device), "impl": model.impl}
        again |= {"weights": model.weights}
        team = Team.start(ranks, {**again, "allow_untested": model.impl == "hf"}, timeout)
        command = None
    team.compare(identity(model, command))
    return replace(loaded, model=team.share(model))
