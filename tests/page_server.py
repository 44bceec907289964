"""A stand-in for the server behind the page: scripted answers, slow enough to be looked at."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "src" / "foretell" / "server" / "page"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}

# (text, origin, place): two steps of the first drafter, one of the second, some of the model alone
SCRIPT = [
    ("The", "target", 1),
    *((" sky", "suffix", 1), (" looks", "suffix", 2), (" blue", "target", 3)),
    *((" because", "mtp", 1), (" of", "mtp", 2), (" Ray", "mtp", 3), ("leigh", "target", 4)),
    (" scattering", "target", 1),
    *((":\n", "suffix", 1), ("short", "suffix", 2), (" waves", "suffix", 3), (" are", "suffix", 4)),
    *((" sc", "target", 5), ("attered", "target", 1), (" more", "target", 1), (" <b>", "target", 1)),
    *((b"\xc3", "target", 1), (b"\xbc", "target", 1), (".", "target", 1)),
]  # fmt: skip

STATS: dict[str, Any] = {
    "server": {
        "model": "smollm2-135m",
        "drafters": ["suffix", "mtp"],
        "rule": "coupled",
        "lossless": True,
    },
    "planner": {"cost_ms": {"1": 1000 / 41, "2": 25.0}},
    "totals": {"drafts": 40, "al": 2.6, "marginal_acceptance": [0.8, 0.55, 0.35, 0.2, 0.1, 0.05, 0.0, 0.0]},
}


def token(index: int) -> dict[str, Any]:
    text, origin, place = SCRIPT[index]
    named: dict[str, Any] = {"id": 100 + index, "text": text}
    if isinstance(text, bytes):
        named |= {"text": "bytes:" + "".join(f"\\x{byte:02x}" for byte in text), "bytes": list(text)}
    top = [{**named, "logprob": -0.25}]
    top += [{"id": 7, "text": "\n", "logprob": -2.0}, {"id": 8, "text": " other", "logprob": -3.5}]
    return {
        **named,
        "drafted": origin != "target",
        "origin": origin,
        "place": place,
        "logprob": -0.25,
        "top": top,
    }


class Stand(BaseHTTPRequestHandler):
    """Answers by what the last message says: "fail", "break" and "slow" are understood."""

    def log_message(self, *_args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        name = self.path.split("?")[0].removeprefix("/page").lstrip("/") or "index.html"
        if name == "stats":
            if self.server.down:  # type: ignore[attr-defined]
                self.send_error(503)
            else:
                self._json(200, STATS)
        elif (path := PAGE / name).is_file() and path.parent == PAGE:
            self._send(200, KINDS[path.suffix], path.read_bytes())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        said = asked["messages"][-1]["content"]
        if "fail" in said:
            self._json(400, {"error": {"message": "max_tokens must be at least 1, got 0", "type": "x"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(asked, said)
        except OSError:
            self.server.gone.set()  # type: ignore[attr-defined]

    def _stream(self, asked: dict[str, Any], said: str) -> None:
        count = len(SCRIPT) * (20 if "long" in said else 1)
        for start in range(0, count, 2):
            tokens = [token(i % len(SCRIPT)) for i in range(start, start + 2)]
            if not asked["foretell"]["draft"]:
                tokens = [{**t, "drafted": False, "origin": "target", "place": 1} for t in tokens]
            parts = [SCRIPT[i % len(SCRIPT)][0] for i in range(start, start + 2)]
            data = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
            if data == b" <b>\xc3":  # the character comes with the next chunk
                data = b" <b>"
            delta = {"content": data.decode().replace("\ufffd", "")} if data[0] != 0xBC else {"content": "ü."}
            self._event(
                {"choices": [{"delta": delta, "finish_reason": None}], "foretell": {"tokens": tokens}}
            )
            time.sleep(0.15 if "slow" in said else 0.01)
            if "break" in said and start == 8:
                return
        stats = {"tokens_per_s": 98.4, "accepted": 9, "drafted": 14, "al": 2.8}
        facts = {"tokens": [], "stats": [stats], "seeds": [7], "lossless": True}
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}], "foretell": facts})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve() -> ThreadingHTTPServer:
    """A running stand-in; `shutdown` ends it. `asked`: bodies of requests; `gone`: a client left; `down`: it
    plays dead."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stand)
    server.asked, server.gone, server.down = [], threading.Event(), False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
