"""How ranks come together, find out who is to blame when one is missing, and part.

On one machine `Team.start` starts the other ranks as processes; under torchrun `Team.join` finds them. Ranks
meet in a key-value store, compare what must be equal, and send a sign of life every second. When an exchange
breaks or takes too long, rank 0 looks at these signs, names the rank, and ends the processes that it started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import IO, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from foretell.errors import InputError, RankError
from foretell.models.base import TargetModel
from foretell.parallel.channel import Channel
from foretell.parallel.group import Group
from foretell.parallel.model import Rank, ShardedModel, follow

_log = logging.getLogger(__name__)

MOST_RANKS = 512
TIMEOUT = 60.0  # seconds that a rank may take for its part of an exchange
_FOREVER = timedelta(days=3650)
_BEAT = 1.0
_SILENT = 3.0  # seconds without a sign of life
LOST = 75  # exit code of a rank that ended because it lost another
_GRACE = 3.0  # seconds for a process to end by itself
_HEARD = 20.0  # seconds for rank 0 to say what is wrong; torchrun ends the others then


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size() -> int | None:
    """How many ranks torchrun started; None = it did not."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def check_ranks(ranks: int, timeout: float = TIMEOUT) -> None:
    """Raises InputError where so many ranks cannot be had here, or the time-out is none."""
    if not 0 < timeout < _FOREVER.total_seconds():
        raise InputError(f"rank_timeout must be above 0 and finite, got {timeout}")
    if timeout != TIMEOUT and ranks == 1:
        _log.warning("rank_timeout has no effect: there is one rank")
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"context_parallel must be from 1 to {MOST_RANKS}, got {ranks}")
    started = world_size()
    if started is not None and started != ranks:
        raise _refusal(
            int(os.environ["RANK"]),
            f"context_parallel is {ranks}, but torchrun started {started} ranks",
            "leave context_parallel out: torchrun says how many",
        )
    if ranks > 1 and dist.is_initialized():
        raise InputError(
            "this process belongs to a group of ranks already", hint="share the loaded model (LLM.loaded)"
        )


def _refusal(rank: int, message: str, hint: str) -> BaseException:
    """What all ranks find wrong: rank 0 says it, the others end without a word, and later: torchrun ends
    every rank when one has ended, also one that has not said yet what is wrong."""
    if rank == 0:
        return InputError(message, hint=hint)
    time.sleep(_HEARD)
    return SystemExit(2)


def identity(model: TargetModel, command: list[str] | None = None) -> dict[str, Any]:
    """What must be the same on all ranks.

    Args:
        command: the command line, where every rank has one.
    """
    return {
        "foretell": version("foretell"),
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "implementation": model.impl,
        "weights": f"{model.weights} {model.dtype}",
        "model": [model.num_layers, model.hidden_size, model.vocab_size, model.max_context],
        **({} if command is None else {"command": command}),
    }


@dataclass
class Team:
    """This process among its ranks; see `start` and `join`.

    Attributes:
        children: on rank 0, the processes that it started, by rank, with what they wrote to stderr.
    """

    rank: int
    size: int
    store: Store
    timeout: float = TIMEOUT
    children: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _control: dist.ProcessGroup | None = None
    _group: Group | None = None

    @staticmethod
    def start(size: int, model: Mapping[str, Any], timeout: float = TIMEOUT) -> Team:
        """Rank 0 of `size` ranks on this machine; the others are started.

        Args:
            model: arguments of `foretell.models.load.load_model` for the others.

        Raises:
            RankError: one of them ended before it was ready.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("model", json.dumps(model))
        team = Team(0, size, store, timeout)
        threads = max(1, (os.cpu_count() or 1) // size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        for rank in range(1, size):
            team.children[rank] = _start_worker(rank, size, store.port, timeout, threads)
        weakref.finalize(team, _end, team.children)
        try:
            team._await_children("ready")
            team.connect("gloo")
        except BaseException:
            team.close()
            raise
        return team

    @staticmethod
    def join(device: torch.device, timeout: float = TIMEOUT) -> Team:
        """This process's place among the ranks that torchrun started.

        Args:
            device: of the model, whose tensors are exchanged.

        Raises:
            RankError: they do not come together in time.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=timeout)
        try:
            tcp = TCPStore(host, port, is_master=own, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise RankError(f"rank {rank} cannot reach {host}:{port}: {error}") from error
        team = Team(rank, size, PrefixStore("foretell", tcp), timeout)
        team.connect("nccl" if device.type == "cuda" else "gloo")
        return team

    def connect(self, backend: str) -> None:
        """Makes the group of ranks, and begins to send signs of life.

        Raises:
            RankError: the others do not come in time.
        """
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )
            self._control = dist.new_group(backend="gloo", timeout=_FOREVER)
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error
        threading.Thread(target=_beat, args=(self,), daemon=True).start()

    def compare(self, own: Mapping[str, Any]) -> None:
        """Raises InputError where a rank differs from rank 0 in what must be equal; the other ranks end."""
        self.store.set(f"identity/{self.rank}", json.dumps(own))
        keys = [f"identity/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RankError(self.explain(str(error))) from error
        first, *others = (json.loads(self.store.get(key)) for key in keys)
        for rank, other in enumerate(others, 1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise _refusal(
                        self.rank,
                        f"rank {rank} differs from rank 0 in {name}: {other.get(name)!r}, not "
                        f"{first.get(name)!r}",
                        "start all ranks with the same version, model and command",
                    )

    def share(self, model: TargetModel) -> ShardedModel:
        """The model over all ranks, on rank 0; the other ranks do their part until rank 0 ends, and this
        process with it."""
        self._group = group = Group(self.rank, self.size, explain=self.explain)
        part = Rank(model, group)
        channel = Channel(self.rank, self.size, self._control, self.timeout, self.explain)
        if self.rank:
            follow(part, channel)
            self._stop.set()
            sys.exit(0)
        shared = ShardedModel(part, channel, self)
        weakref.finalize(shared, _leave, channel, self)
        return shared

    def explain(self, error: str) -> str:
        """Which rank is to blame for a broken exchange, in one line. The team is over."""
        first = error.splitlines()[0] if error else "no answer"
        if self.rank:
            return f"rank {self.rank} lost the others: {first}"
        found, deadline = None, time.monotonic() + _GRACE
        while found is None and self.children and time.monotonic() < deadline:
            found = next((how for rank in self.children if (how := self._ended(rank)) is not None), None)
            time.sleep(0.05)
        found = self._quiet(first) if found is None else found
        self.close()
        return found

    def close(self) -> None:
        """Ends the processes that this one started, and leaves the group."""
        self._stop.set()
        _end(self.children)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._stop.is_set()

    def _await_children(self, key: str) -> None:
        """Until all have set the key."""
        for rank in self.children:
            while not self.store.check([f"{key}/{rank}"]):
                if (found := self._ended(rank)) is not None:
                    raise RankError(found)
                time.sleep(0.05)

    def _ended(self, rank: int) -> str | None:
        """What a child's end looks like; None = it runs, or ended because of another."""
        process, log = self.children[rank]
        code = process.poll()
        if code in (None, LOST):
            return None
        log.seek(0)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        assert code is not None
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} {how}" + (f": {lines[-1].strip()}" if lines and code > 0 else "")

    def _quiet(self, error: str) -> str:
        """The rank whose last sign of life is oldest, if it is old; else the one that is behind in exchanges;
        else the error as it is."""
        now, seen = time.time(), {}
        with contextlib.suppress(RuntimeError):
            for rank in range(1, self.size):
                key = f"beat/{rank}"
                found = self.store.get(key).split() if self.store.check([key]) else (b"0", b"0")
                seen[rank] = float(found[0]), int(found[1])
        running = {
            r: s for r, s in seen.items() if r not in self.children or self.children[r][0].poll() is None
        }
        oldest = min(running, key=lambda rank: running[rank][0], default=0)
        if oldest and now - running[oldest][0] > _SILENT:
            return f"rank {oldest} gives no sign of life"
        slowest = min(seen, key=lambda rank: seen[rank][1], default=0)
        if slowest and self._group is not None and seen[slowest][1] < self._group.exchanges:
            return f"rank {slowest} did not do its part within {self.timeout:g} seconds"
        return f"a rank did not do its part within {self.timeout:g} seconds: {error}"


def _start_worker(
    rank: int, size: int, port: int, timeout: float, threads: int
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    log = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process has ended)
    command = [
        sys.executable,
        "-m",
        "foretell.parallel.worker",
        str(rank),
        str(size),
        str(port),
        str(timeout),
    ]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=environment
    )
    return process, log


def _beat(team: Team) -> None:
    """Signs of life, with the number of exchanges so far, until the store or the process ends."""
    with contextlib.suppress(RuntimeError):
        while not team.closed:
            done = 0 if team._group is None else team._group.exchanges
            team.store.set(f"beat/{team.rank}", f"{time.time()} {done}")
            team._stop.wait(_BEAT)


def _leave(channel: Channel, team: Team) -> None:
    """Rank 0 is done: the others may go."""
    if team.closed:
        return
    with contextlib.suppress(RankError):
        channel.send(("stop",))
    for process, _ in team.children.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    team.close()


def _end(children: Mapping[int, tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
    """Ends processes that still run."""
    for process, _ in children.values():
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
