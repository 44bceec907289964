"""The page at `/`: files of the folder `page`, read once. They request nothing but this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from foretell.server.errors import ApiError

PREFIX = "/page/"  # of everything but the page itself
_FOLDER = Path(__file__).parent / "page"
_KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Has the app answer `/` and what the page needs."""
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _KINDS}
    known = {name: (path.read_bytes(), _KINDS[path.suffix]) for name, path in files.items()}

    def answer(name: str) -> Response:
        if name not in known:
            raise ApiError(404, f"GET {PREFIX}{name} does not exist here")
        body, kind = known[name]
        return Response(body, media_type=kind, headers=_HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page."""
        return answer("index.html")

    @app.get(PREFIX + "{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """A part of the page."""
        return answer(name)
