"""Errors in OpenAI's form, so that its clients raise their own exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from foretell.errors import InputError

_FIELD = re.compile(r"[a-z_]+")
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong, and what would be right.
        param: the field that is meant.
        code: OpenAI's short name, where there is one.
        headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        message = message.encode(errors="backslashreplace").decode()
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an HTTP answer."""
        return JSONResponse(self.to_json(), self.status, self.headers)


def from_input(error: InputError, fields: Sequence[str] = ()) -> ApiError:
    """A user's error. Its message begins with the name of the field where one of `fields` is meant."""
    found = _FIELD.match(error.message)
    name = found[0] if found else None
    return ApiError(400, str(error), param=name if name in fields else None)


def from_validation(problems: Sequence[Any]) -> ApiError:
    """What the schema of a body refused: the first problem, with the name of its field."""
    first = problems[0]
    kind, where = str(first["type"]), [part for part in first["loc"] if part not in ("body", "query", "path")]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason} at character {where[0] if where else 0}")
    # a union's alternatives are named in the place; a client does not know them
    names = [str(part) for part in where if not re.search(r"[\[\]({-]|^(str|int|list|Text)", str(part))]
    param = ".".join(names) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    if kind == "missing":
        return ApiError(
            400, f"{param or 'the body'} is missing", param=param, code="missing_required_parameter"
        )
    if kind == "value_error" and isinstance(cause := first.get("ctx", {}).get("error"), InputError):
        return from_input(cause, _FIELD.findall(cause.message)[:1])
    got = repr(first.get("input"))
    short = got if len(got) <= 80 else got[:77] + "..."
    return ApiError(400, f"{param or 'the body'}: {first['msg']}, got {short}", param=param)


def install(app: FastAPI) -> None:
    """Has every error of the app answered in this form."""

    @app.exception_handler(ApiError)
    async def _own(_request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(InputError)
    async def _input(_request: Request, error: InputError) -> JSONResponse:
        return from_input(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors()).response()

    @app.exception_handler(RecursionError)
    async def _deep(_request: Request, _error: RecursionError) -> JSONResponse:
        return ApiError(400, "the body is nested too deeply").response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path} does not exist here"
        elif error.status_code == 400:
            message = "the body cannot be read as JSON: it is not UTF-8, or nested too deeply"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def _bug(_request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"internal error: {type(error).__name__}").response()
