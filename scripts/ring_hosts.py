"""Two hosts on one machine: network namespaces joined by a link of a given rate (tc), one rank in each.

Run as root: `python scripts/ring_hosts.py --shard 1024 --mbit 100 400 1000 4000`. Prints, per rate, what a
layer of ring attention takes and what the planner expects from the time of computing alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from foretell.bench.ring import Setting, collect
from foretell.parallel.choose import Link, Work, seconds

HOSTS = ("ring-a", "ring-b")
LATENCY = 1e-3  # of a small exchange over gloo, as measured
RANK = """
import sys
from foretell.bench.ring import Setting, measure_rank
measure_rank(int(sys.argv[1]), Setting(2, int(sys.argv[2])), "zigzag", int(sys.argv[3]), sys.argv[4])
"""


def run(*command: str) -> None:
    """Runs a command; its failure is ours."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def connect(mbit: int) -> None:
    """Two namespaces and a cable of this rate between them."""
    for host in HOSTS:
        run("ip", "netns", "add", host)
    run("ip", "link", "add", "ring0", "netns", HOSTS[0], "type", "veth", "peer", "ring0", "netns", HOSTS[1])
    for number, host in enumerate(HOSTS, 1):
        inside = ("ip", "netns", "exec", host)
        run(*inside, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "ring0")
        run(*inside, "ip", "link", "set", "ring0", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        burst = 128 if mbit <= 1000 else 512
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", f"{burst}kb", "latency", "2s")
        run(*inside, "tc", "qdisc", "add", "dev", "ring0", "root", *shape)


def disconnect() -> None:
    """Takes both away."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def measure(shard: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a layer by way."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "ring0", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    host,
                    sys.executable,
                    "-c",
                    RANK,
                    str(rank),
                    str(shard),
                    str(repeats),
                    folder,
                ],
                env=environment,
            )
            for rank, host in enumerate(HOSTS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        found, _ = collect(Setting(2, shard), folder)
    times: dict[str, float] = found["ms"]
    return times


def main() -> None:
    """One line of JSON per rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, default=1024)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 400, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    setting = Setting(2, given.shard)
    work = Work(2, 2 * given.shard, 0, setting.heads, setting.kv_heads, setting.dim, 4)
    for mbit in given.mbit:
        disconnect()
        try:
            connect(mbit)
            times = measure(given.shard, given.repeats)
        finally:
            disconnect()
        flops = work.flops / (times["compute alone"] / 1e3)
        link = Link(flops, mbit * 1e6 / 8, LATENCY)
        expected = {
            name: round(1e3 * seconds(name, work, link), 1) for name in ("pass-kv", "pass-q", "all-gather")
        }
        print(json.dumps({"mbit": mbit, "ms": times, "expected_ms": expected}), flush=True)


if __name__ == "__main__":
    main()
