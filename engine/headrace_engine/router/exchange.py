"""One client request and the one answer to it. Until it begins, everything can be retried."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from headrace_engine.router import headers
from headrace_engine.router.replies import Reply, error_body, named_error

NAMED_EVENT_ROUTES = ("/v1/responses", "/v1/messages")  # their clients read events by name

LAST_WORDS_SECONDS = 1.0  # for an error event to a client that may not be reading


class ClientGone(Exception):
    """The client has closed its connection, or does not read: nothing more is said on it."""


class Exchange:
    """The client's side of a request; engines never see it."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.body = b""
        self.wants_stream = False
        self.started_at = time.monotonic()
        self.first_byte_seconds: float | None = None
        self.broken = False  # an error came after the first byte
        self.response: web.StreamResponse | None = None
        self._transport = request.transport  # the request forgets it when the server closes the connection
        self._timeout: asyncio.Timeout | None = None
        self._timeout_reason = "the request's deadline has passed"

    def limit(self, seconds: float) -> asyncio.Timeout:
        """The deadline of the whole exchange, to be entered around all of it."""
        self._timeout = asyncio.timeout(seconds)
        return self._timeout

    def expire(self, reason: str) -> None:
        """Make the deadline now, for the reason that the client will read."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout_reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def timeout_reason(self) -> str:
        return self._timeout_reason

    def leg_headers(self, leg: str | None, attempt: int) -> dict[str, str]:
        """Headers for an engine. A further attempt has an id of its own: the first one's legs may still be ending."""
        request_id = self.request_id if attempt == 1 else f"{self.request_id}.attempt-{attempt}"
        return headers.to_engine(self.request.headers, request_id, leg)

    async def reply(self, reply: Reply) -> web.StreamResponse:
        """Answer as a whole and wait until it is sent. Raises ClientGone."""
        response = web.Response(
            status=reply.status,
            body=reply.body,
            headers={**reply.headers, headers.REQUEST_ID: self.request_id},
        )
        await self._begin(response)
        await self.finish()
        return response

    async def start(self, events: bytes) -> web.StreamResponse:
        """Begin a stream with its first events. Raises ClientGone."""
        stream_headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            headers.REQUEST_ID: self.request_id,
        }
        response = web.StreamResponse(status=200, headers=stream_headers)
        await self._begin(response)
        await self.send(events)
        return response

    async def _begin(self, response: web.StreamResponse) -> None:
        self.first_byte_seconds = time.monotonic() - self.started_at
        try:
            await response.prepare(self.request)
        except ConnectionResetError as error:
            raise ClientGone from error
        self.response = response

    async def send(self, events: bytes) -> None:
        """More events; waits while the client is slow. Raises ClientGone."""
        assert self.response is not None
        try:
            await self.response.write(events)
        except ConnectionResetError as error:
            raise ClientGone from error

    async def finish(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionResetError as error:
            raise ClientGone from error

    def abort(self) -> None:
        """Drop the connection with all that is buffered for it: a client that does not read would hold it for ever."""
        if self._transport is not None:
            self._transport.abort()

    async def break_off(self, message: str, code: str) -> None:
        """After the first byte: an explicit error event, then the end of the stream without `[DONE]`.

        In the middle of a whole answer there is nothing to say it with: the connection is dropped. Raises ClientGone,
        also when the client does not read it in time.
        """
        self.broken = True
        if isinstance(self.response, web.Response):
            raise ClientGone
        if self.request.path in NAMED_EVENT_ROUTES:
            words = b"event: error\ndata: " + named_error(message, code=code) + b"\n\n"
        else:
            words = b"data: " + error_body(message, type="server_error", code=code) + b"\n\n"
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self.send(words)
                await self.finish()
        except TimeoutError as error:
            raise ClientGone from error
