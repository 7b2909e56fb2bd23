"""What the router does to a request body: look once, splice one field in, rebuild nothing. Pure."""

from __future__ import annotations

import re

import msgspec

TICKET_KEY = "headrace_ticket"
_OPENING = re.compile(rb"\s*\{\s*")


class BadBody(Exception):
    """The body cannot be a request; the message is for the client."""


class _Body(msgspec.Struct):
    """The fields that matter here; the decoder skips over all others without building them."""

    headrace_ticket: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw = msgspec.Raw(b"false")


_decoder = msgspec.json.Decoder(_Body)


def check_body(body: bytes) -> bool:
    """True if the client asks for a stream. Raises BadBody unless `body` is a JSON object without a ticket of its own.

    A ticket says where prefill writes; of two equal keys most parsers take the last, so a client's ticket would win
    over the spliced one. For the same reason a body that this parser cannot read is refused here: another parser
    might find a ticket in it.
    """
    try:
        parsed = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadBody(f"the request body is not a JSON object: {error}") from None
    if parsed.headrace_ticket is not msgspec.UNSET:
        raise BadBody(f"{TICKET_KEY!r} is the router's own field and cannot be part of a request")
    return bytes(parsed.stream) == b"true"


def splice_ticket(body: bytes, ticket: bytes) -> tuple[bytes, memoryview]:
    """The body with `"headrace_ticket": ticket,` after its first `{`, as chunks to send one after another.

    body: checked by `check_body`. ticket: JSON as the decode group wrote it. Neither is copied or re-encoded.
    """
    opening = _OPENING.match(body)
    if opening is None:
        raise BadBody("the request body is not a JSON object")
    rest = memoryview(body)[opening.end() :]
    comma = b"" if bytes(rest[:1]) == b"}" else b","
    return b'{"' + TICKET_KEY.encode() + b'":' + ticket + comma, rest
