"""OpenAI error bodies with real status codes. One exception class from the door to the response."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from headrace_engine.core import RequestError

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """The request cannot be served; `error` says why, in the client's terms."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(RequestError(400, message, code=code, param=param))


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    return ApiError(RequestError(503, message, "service_unavailable", code, retriable=True))


def error_object(error: RequestError) -> dict[str, dict[str, str | None]]:
    """`{"error": {...}}` as OpenAI clients read it."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def anthropic_error_object(error: RequestError) -> dict[str, Any]:
    """The same as Anthropic's clients read it; `code` and `param` are there for the router and for people."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": fields}


def error_response(error: RequestError, path: str = "") -> web.Response:
    """In the form of the API that has this path."""
    body = anthropic_error_object(error) if path.startswith(ANTHROPIC_PATH) else error_object(error)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers=headers,
    )


def from_http_exception(error: web.HTTPException) -> RequestError:
    """aiohttp's own refusals (unknown route, wrong method, body too large) in the same form."""
    messages = {404: "there is no such route", 405: "this route does not take this method"}
    kind = "not_found_error" if error.status == 404 else "invalid_request_error"
    return RequestError(error.status, messages.get(error.status, error.text or error.reason), kind)
