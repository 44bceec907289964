"""llama.cpp's HTTP server in a process of its own, through xllamacpp: prints its address, serves until stdin
ends.

    python -m foretell.bench.llama_server FILE.gguf SLOTS CONTEXT THREADS
"""

from __future__ import annotations

import sys


def main() -> None:
    """See the module. CONTEXT is what each slot holds."""
    import xllamacpp

    path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.verbosity = slots, slots * context, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1 is ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
