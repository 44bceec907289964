"""`foretell serve`: OpenAI's HTTP interface."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.console import stderr
from foretell.errors import InputError

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

KEY = "FORETELL_API_KEY"


HostOpt = Annotated[str, typer.Option("--host", help="Address to listen on.", show_default=True)]
PortOpt = Annotated[
    int, typer.Option("--port", help="Port to listen on; 0 takes a free one.", show_default=True)
]
KeyOpt = Annotated[
    str | None, typer.Option("--api-key", help=f"What clients must send as bearer token.  [default: ${KEY}]")
]
BatchOpt = Annotated[int, typer.Option("--max-batch", help="Answers that run at once.", show_default=True)]
QueueOpt = Annotated[
    int, typer.Option("--max-queue", help="Answers that may wait beside them.", show_default=True)
]
BodyOpt = Annotated[int, typer.Option("--max-body", help="Bytes that a request may have.", show_default=True)]
TimeoutOpt = Annotated[
    float, typer.Option("--timeout", help="Seconds that a request may take.", show_default=True)
]
GraceOpt = Annotated[
    float, typer.Option("--grace", help="Seconds to finish answers in, once told to stop.", show_default=True)
]
CorsOpt = Annotated[list[str] | None, typer.Option("--cors", help="Origin whose pages may call; repeatable.")]
ReplicasOpt = Annotated[
    int, typer.Option("--replicas", help="Processes, each with the model.", show_default=True, min=1, max=64)
]
LogOpt = Annotated[bool, typer.Option("--log-json", help="Logs as one JSON object per line.")]


def serve(
    ctx: typer.Context,
    model: opt.ModelOpt = "smollm2-135m",
    drafter: opt.DrafterOpt = "auto",
    drafter_opt: opt.DrafterOptOpt = None,
    draft_tokens: opt.DraftTokensOpt = None,
    verify: opt.VerifyOpt = "coupled",
    host: HostOpt = "127.0.0.1",
    port: PortOpt = 8000,
    api_key: KeyOpt = None,
    max_batch: BatchOpt = 16,
    max_queue: QueueOpt = 64,
    max_body: BodyOpt = 4 << 20,
    timeout: TimeoutOpt = 600.0,
    grace: GraceOpt = 30.0,
    cors: CorsOpt = None,
    replicas: ReplicasOpt = 1,
    log_json: LogOpt = False,
    device: opt.DeviceOpt = "auto",
    impl: opt.ImplOpt = "auto",
    weights: opt.WeightsOpt = "stored",
    allow_untested: opt.UntestedOpt = False,
    kv_tokens: opt.KvTokensOpt = None,
    kv: opt.KvOpt = "full",
    kv_budget: opt.KvBudgetOpt = None,
    lossless: opt.LosslessOpt = False,
    kv_profile: opt.KvProfileOpt = None,
    context_parallel: opt.RanksOpt = None,
) -> None:
    """Answer over HTTP, as OpenAI's servers do."""
    from foretell.parallel.team import under_torchrun
    from foretell.server import Settings, Worker, create_app
    from foretell.server.front import Front, create_front
    from foretell.server.logs import set_up
    from foretell.server.metrics import Metrics
    from foretell.server.serving import listen

    if under_torchrun():
        raise InputError("serve cannot be started by torchrun", hint="use --context-parallel N")
    settings = Settings(
        api_key=os.environ.get(KEY) or None if api_key is None else api_key,
        max_queue=max_queue,
        max_body=max_body,
        timeout=timeout,
        grace=grace,
        cors=tuple(cors or ()),
    )
    set_up(as_json=log_json)
    listener = listen(host, port)
    if replicas > 1:
        front = Front([_command(ctx)] * replicas, settings)
        _run(create_front(front), listener, host)
    else:
        metrics = Metrics()
        worker = Worker(lambda: opt.load_llm(ctx.params), settings.max_queue, metrics)
        _run(create_app(worker, settings, metrics), listener, host)


def _run(app: FastAPI, listener: socket.socket, host: str) -> None:
    from foretell.server.replicas import PARENT
    from foretell.server.serving import Server

    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
    stderr().print(f"{address}: loading the model", style="dim", soft_wrap=True)

    def ready() -> None:
        stderr().print(f"{address} is ready", style="dim", soft_wrap=True)

    parent = os.environ.get(PARENT)
    server = Server(app, listener, ready, None if parent is None else int(parent))
    server.run_here()
    if server.failed:
        sys.exit(1)


def _command(ctx: typer.Context) -> list[str]:
    """How a replica is started: with the same options, but for where it listens and how many there are."""
    command = ["serve", "--host", "127.0.0.1", "--port", "0"]
    for option in ctx.command.params:
        name = option.name or ""
        given = ctx.params.get(name)
        if (
            name in ("host", "port", "replicas", "api_key", "cors")
            or given == option.default
            or given is None
        ):
            continue
        if isinstance(given, bool):
            command.append(option.opts[0])
            continue
        for value in given if isinstance(given, (list, tuple)) else [given]:
            command += [option.opts[0], str(value)]
    return command
