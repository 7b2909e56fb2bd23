"""Whole answers to the client, the OpenAI error body, and how a leg fails."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from headrace_engine.core import Role

JSON = "application/json"
NOT_SERVING = frozenset({"draining", "starting"})  # codes of an engine that takes no requests now


@dataclass(frozen=True)
class Reply:
    """A complete response, from an engine or from the router itself."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": JSON})


def error_body(message: str, *, type: str, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": None, "code": code}})


def named_error(message: str, *, code: str | None) -> bytes:
    """The data of an `error` event, as clients of Responses and of Messages read it."""
    error = {"type": "api_error", "message": message, "code": code}
    return msgspec.json.encode({"type": "error", "code": code, "message": message, "param": None, "error": error})


def error_reply(
    status: int, message: str, *, code: str | None = None, retry_after_seconds: float | None = None
) -> Reply:
    """The router's own error. 4xx is the client's to mend, anything else is not."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    headers = {"Content-Type": JSON}
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))
    return Reply(status, error_body(message, type=kind, code=code), headers)


def error_code(body: bytes) -> str | None:
    """The `error.code` of an OpenAI error body; None if it is none."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except msgspec.MsgspecError:
        return None


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class LegFailure(Exception):
    """One leg of an attempt failed, before the client has seen a byte.

    reply: what the client gets if there is no further attempt. retriable: another group may succeed.
    cause: one word for metrics and logs. `refused`: the engine answered with an error status; `reported`: an error
    event in the stream; `unreachable`: no connection, or it broke; `deadline`: silence; `unresponsive`: silence to
    `/health` too; `protocol`: an answer that is not what the contract says; `unpaired`: no prefill group can write this
    decode group's cache.
    """

    def __init__(self, role: Role, url: str, cause: str, reply: Reply, *, retriable: bool) -> None:
        super().__init__(f"{role} group at {url}: {cause}, status {reply.status}: {reply.body[:300]!r}")
        self.role = role
        self.url = url
        self.cause = cause
        self.reply = reply
        self.retriable = retriable

    @property
    def is_turned_away(self) -> bool:
        """The group has said that it takes no requests now; it has not begun with this one."""
        return self.cause == "refused" and self.reply.status == 503 and error_code(self.reply.body) in NOT_SERVING
