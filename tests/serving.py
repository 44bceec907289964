"""A real server on a free port, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai

from foretell.api import LLM
from foretell.server import Settings, Worker, create_app
from foretell.server.app import Service
from foretell.server.metrics import Metrics
from foretell.server.serving import Server, listen


@dataclass(frozen=True)
class Running:
    """A server that answers; `model` is its name for clients."""

    url: str
    service: Service

    @property
    def model(self) -> str:
        return self.service.shape.model

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, **{"api_key": "none", **options})

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Until no request runs or waits, here and in the engine."""
        end = time.monotonic() + seconds
        while self.service.worker.answers or not self.service.worker.llm.engine.idle:
            assert time.monotonic() < end, "the server is still busy"
            time.sleep(0.005)


@contextmanager
def serving(make: Callable[[], LLM], **settings: object) -> Iterator[Running]:
    """Serves what `make` builds until the block ends."""
    listener, chosen = listen("127.0.0.1", 0), Settings(**settings)
    metrics = Metrics()
    app = create_app(Worker(make, chosen.max_queue, metrics), chosen, metrics)
    ready = threading.Event()
    server = Server(app, listener, ready.set)
    thread = threading.Thread(target=server.run_here, daemon=True)
    thread.start()
    while not ready.wait(0.05):
        assert thread.is_alive(), "the server did not start"
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
