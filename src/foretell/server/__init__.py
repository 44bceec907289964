"""The server: OpenAI's HTTP interface over one `LLM`."""

from foretell.server.app import create_app
from foretell.server.settings import Settings
from foretell.server.worker import Worker

__all__ = ["Settings", "Worker", "create_app"]
