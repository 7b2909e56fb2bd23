"""What the router reads in the events of a decode leg."""

from __future__ import annotations

import json

import pytest

from headrace_engine.core import RequestError
from headrace_engine.server.answers import Format
from headrace_engine.server.errors import ApiError
from headrace_engine.server.legs import _failure

FORMAT = Format("r", "m", None, is_chat=False)  # type: ignore[arg-type]
LOST = RequestError(503, "the KV did not come", "service_unavailable", "kv_transfer_failed", retriable=True)
BODY = {
    "error": {
        "message": "the KV did not come",
        "type": "service_unavailable",
        "param": None,
        "code": "kv_transfer_failed",
    }
}


@pytest.mark.parametrize(
    ("has_answer", "name", "data"),
    [(False, "error", {"status": 503, "retriable": True, "body": BODY}), (True, "", BODY)],
)
def test_a_failure_has_its_code_before_and_after_the_first_token(has_answer: bool, name: str, data: object) -> None:
    lines = _failure(ApiError(LOST), has_answer, FORMAT).decode().split("\n")
    assert lines.pop(0) == f"event: {name}" if name else True
    assert json.loads(lines[0].removeprefix("data: ")) == data
    assert lines[1:] == ["", ""]
