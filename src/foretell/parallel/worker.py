"""`python -m foretell.parallel.worker RANK SIZE PORT TIMEOUT`: a rank that `Team.start` starts. It is silent,
and ends with rank 0, whose end it sees by its standard input."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def main() -> None:
    """Loads rank 0's model and does its part until rank 0 ends."""
    from foretell.errors import RankError
    from foretell.models.load import load_model
    from foretell.parallel.team import LOST, Team, identity

    rank, size, port, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
    model = json.loads(store.get("model"))
    loaded = load_model(**model)
    team = Team(rank, size, store, timeout)
    store.set(f"ready/{rank}", "yes")
    team.connect("gloo")
    team.compare(identity(loaded.model))
    try:
        team.share(loaded.model)
    except RankError as error:  # threads of the group may not end in time for an orderly exit
        print(error, file=sys.stderr, flush=True)
        os._exit(LOST)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
