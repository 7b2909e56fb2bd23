"""The legs of a request as the contract says (docs/architecture.md, "HTTP between router and engines")."""

from __future__ import annotations

import asyncio
from typing import Annotated

import aiohttp
import msgspec

from headrace_engine.core import Role
from headrace_engine.router.engines import Engines, protocol_failure, refusal
from headrace_engine.router.group import Charge
from headrace_engine.router.replies import LegFailure, Reply, error_code, error_reply
from headrace_engine.router.sse import FIRST_NAMES, Event, EventReader, StreamBroken

EVENT_STREAM = "text/event-stream"
FINGERPRINT_MISMATCH = "fingerprint_mismatch"
# 409 codes that say the two groups do not fit each other now, and what the client gets when no pair does: two
# tokenizers stay different, a stale ticket is over with the next one.
_PAIRING_FAULTS = {"prompt_mismatch": 500, "stale_ticket": 503}
FINISH_SECONDS = 1.0
NO_TICKET = b"null"


class FingerprintRefused(Exception):
    """The prefill group has not accepted the ticket: its cache has another layout. The ticket is still good."""


class _TicketHead(msgspec.Struct):
    fingerprint: str
    num_prompts: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Outcome(msgspec.Struct):
    """The data of an `error` or `response` event."""

    status: int
    body: msgspec.Raw
    retriable: bool = False


class DecodeLeg:
    """An open decode leg that has handed out its first ticket. `close` it on every path: that cancels what is left.

    `tickets` gets one for each prompt of the request, `num_tickets` in all: JSON, as decode wrote it.
    """

    def __init__(self, engines: Engines, charge: Charge, response: aiohttp.ClientResponse) -> None:
        self._engines = engines
        self._charge = charge
        self._response = response
        self._url = charge.group.url
        self.reader = EventReader(response.content, engines.limits.max_reply_bytes)
        self.tickets: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_tickets = 0  # it wants no KV
        self.fingerprint = ""
        self._num_awaited = 0  # tickets that have not come

    @classmethod
    async def open(
        cls, engines: Engines, charge: Charge, path: str, leg_headers: dict[str, str], body: bytes
    ) -> DecodeLeg:
        """Send the leg and wait for its ticket. Raises LegFailure; then nothing is left open."""
        async with engines.faults(charge, Role.DECODE, engines.limits.ticket_seconds):
            response = await engines.post(charge, path, leg_headers, body)
            leg = cls(engines, charge, response)
            try:
                await leg._take_ticket()
            except BaseException:
                leg.close()
                raise
            return leg

    async def _take_ticket(self) -> None:
        response = self._response
        if response.status != 200:
            raise refusal(Role.DECODE, self._url, await self._engines.read_reply(response))
        if response.content_type != EVENT_STREAM:
            raise protocol_failure(Role.DECODE, self._url, f"content type {response.content_type}, no event stream")
        event = await self.reader.next_event()
        if event is not None and event.name == "error":
            raise self._reported(event)
        if event is None or event.name != "ticket":
            raise protocol_failure(Role.DECODE, self._url, "the stream does not begin with a ticket")
        if event.data == NO_TICKET:
            return
        head = self._add_ticket(event)
        self.fingerprint, self.num_tickets = head.fingerprint, head.num_prompts
        self._num_awaited = head.num_prompts - 1

    def _add_ticket(self, event: Event) -> _TicketHead:
        try:
            head = msgspec.json.decode(event.data, type=_TicketHead)
        except msgspec.MsgspecError as error:
            raise protocol_failure(Role.DECODE, self._url, f"unreadable ticket: {error}") from error
        self.tickets.put_nowait(event.data)
        return head

    async def first(self) -> Reply | bytes:
        """What follows the tickets: a whole answer, or the first of the client's own events. Raises LegFailure.

        A ticket behind the first has no limit of its own: its prompt may wait for room until others of the same
        request have been answered.
        """
        async with self._engines.faults(self._charge, Role.DECODE, None):
            event = await self.reader.next_event()
            while event is not None and event.name == "ticket" and self._num_awaited:
                self._num_awaited -= 1
                self._add_ticket(event)
                event = await self.reader.next_event()
        if event is None:
            raise protocol_failure(Role.DECODE, self._url, "the stream ended after the ticket")
        if event.name == "error":
            raise self._reported(event)
        if event.name == "response":
            outcome = self._outcome(event)
            return Reply(outcome.status, bytes(outcome.body))
        if event.name and event.name not in FIRST_NAMES:
            raise protocol_failure(Role.DECODE, self._url, f"unknown event {event.name!r}")
        return event.raw

    def unreachable(self, now: float) -> None:
        """The stream broke after its first bytes."""
        self._charge.unreachable(now)

    async def finish(self) -> None:
        """After a whole answer: read the stream's end, a moment away, so that the connection can be used again."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self.reader.next_event()
        except (aiohttp.ClientError, OSError, StreamBroken, TimeoutError):
            pass  # the answer is complete; only the connection is lost

    def close(self) -> None:
        """Gives the connection back if the stream has been read to its end, else closes it, which aborts the leg."""
        self._response.close()

    def _reported(self, event: Event) -> LegFailure:
        outcome = self._outcome(event)
        reply = Reply(outcome.status, bytes(outcome.body))
        return LegFailure(Role.DECODE, self._url, "reported", reply, retriable=outcome.retriable)

    def _outcome(self, event: Event) -> _Outcome:
        try:
            return msgspec.json.decode(event.data, type=_Outcome)
        except msgspec.MsgspecError as error:
            raise protocol_failure(Role.DECODE, self._url, f"unreadable {event.name} event: {error}") from error


async def run_prefill_leg(
    engines: Engines, charge: Charge, path: str, leg_headers: dict[str, str], chunks: tuple[bytes, memoryview]
) -> None:
    """Send the prefill leg and wait until it has pushed. Raises LegFailure or FingerprintRefused.

    Cancelling this closes the connection, and the engine then tells decode that no more writes will come.
    """
    async with engines.faults(charge, Role.PREFILL, engines.limits.prefill_seconds):
        response = await engines.post(charge, path, leg_headers, *chunks)
        try:
            reply = await engines.read_reply(response)
        finally:
            response.close()
    if reply.status == 200:
        return
    code = error_code(reply.body) if reply.status == 409 else None
    if code == FINGERPRINT_MISMATCH:
        raise FingerprintRefused
    if code in _PAIRING_FAULTS:
        message = f"prefill refused the ticket: {reply.body.decode(errors='replace')[:500]}"
        retry_after = 1.0 if _PAIRING_FAULTS[code] == 503 else None
        reply = error_reply(_PAIRING_FAULTS[code], message, code=code, retry_after_seconds=retry_after)
    raise refusal(Role.PREFILL, charge.group.url, reply)
