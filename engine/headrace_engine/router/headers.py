"""Which headers cross the router. Lists of what passes: anything else, and so anything hop-by-hop, stays behind."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

LEG = "x-headrace-leg"
REQUEST_ID = "X-Request-Id"

_TO_ENGINE = ("Authorization", "Accept", "User-Agent", "traceparent", "tracestate", "baggage")
_TO_CLIENT = ("Content-Type", "Cache-Control", "Retry-After", "WWW-Authenticate", "X-Accel-Buffering")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id if it is fit for logs and headers, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def to_engine(headers: Mapping[str, str], request_id: str, leg: str | None) -> dict[str, str]:
    """Headers of one leg's request. leg: `decode`, `prefill`, or None for a whole request."""
    chosen = {name: headers[name] for name in _TO_ENGINE if name in headers}
    chosen["Content-Type"] = headers.get("Content-Type", "application/json")
    chosen[REQUEST_ID] = request_id
    if leg is not None:
        chosen[LEG] = leg
    return chosen


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _TO_CLIENT if name in headers}
