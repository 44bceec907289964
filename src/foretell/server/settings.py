"""What the operator of a server decides."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import InputError

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and manners of a server.

    Args:
        api_key: what clients must send as a bearer token; None = nothing.
        max_queue: answers that may wait beside those that run; one more is refused with status 429.
        max_body: bytes that a request's body may have.
        timeout: seconds that a request may take.
        grace: seconds that running requests get to finish once the server is told to stop.
        cors: origins whose pages may call this server.

    Raises:
        InputError: naming the option and what would be right.
    """

    api_key: str | None = None
    max_queue: int = 64
    max_body: int = 4 * MEGABYTE
    timeout: float = 600.0
    grace: float = 30.0
    cors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            ("api_key", self.api_key is None or bool(self.api_key.strip()), "not empty"),
            ("max_queue", self.max_queue >= 0, "0 or above"),
            ("max_body", self.max_body >= 1024, "at least 1024 bytes"),
            ("timeout", self.timeout > 0, "above 0 seconds"),
            ("grace", self.grace >= 0, "0 seconds or above"),
        )
        for name, ok, want in checks:
            if not ok:
                raise InputError(f"{name} must be {want}, got {getattr(self, name)!r}")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InputError(f"cors must be an origin such as https://example.org, got {origin!r}")
