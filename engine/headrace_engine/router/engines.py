"""The only file that talks to engines: a keep-alive pool, and connection faults told apart from answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from headrace_engine.core import Role
from headrace_engine.router import headers
from headrace_engine.router.config import Limits
from headrace_engine.router.group import Charge
from headrace_engine.router.replies import LegFailure, Reply, error_reply
from headrace_engine.router.sse import StreamBroken

# Not the client's: an engine sees only headers that this router has chosen.
_NO_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# A machine that loses its power resets no connection, and a leg may be silent for as long as its request takes: the
# kernel asks after so many seconds of silence, so often, and gives the connection up after about half a minute.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}


def _socket_to_engine(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    result = socket.socket(family, kind, protocol)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        result.setsockopt(socket.IPPROTO_TCP, option, value)
    return result


class _Chunks(Payload):
    """A body in pieces of known total length: sent without being joined, and may be sent again."""

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        super().__init__(chunks, content_type="application/json")
        self._size = sum(len(chunk) for chunk in chunks)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for chunk in self._value:
            await writer.write(chunk)


class Engines:
    """HTTP to engine groups. One per router; `close` it at the end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._session = aiohttp.ClientSession(
            # No limit here: the number of requests in flight is bounded at the door.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, socket_factory=_socket_to_engine),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTO_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self, charge: Charge, path: str, leg_headers: dict[str, str], *chunks: bytes | memoryview
    ) -> aiohttp.ClientResponse:
        """Send a leg and wait for the response's head; the caller closes the response. Raises aiohttp's errors."""
        body = _Chunks(chunks)
        response = await self._session.post(
            charge.group.url + path, data=body, headers=leg_headers, allow_redirects=False
        )
        charge.reached()
        return response

    async def ask(
        self,
        method: str,
        url: str,
        path: str,
        request_headers: dict[str, str],
        timeout_seconds: float,
        body: bytes | None = None,
    ) -> Reply:
        """A small request that generates nothing. Raises aiohttp.ClientError, OSError, StreamBroken or TimeoutError."""
        async with (
            asyncio.timeout(timeout_seconds),
            self._session.request(
                method, url + path, headers=request_headers, data=body, allow_redirects=False
            ) as response,
        ):
            return await self.read_reply(response)

    async def read_reply(self, response: aiohttp.ClientResponse) -> Reply:
        """The whole answer, bounded. Raises aiohttp.ClientError or StreamBroken."""
        body = bytearray()
        while chunk := await response.content.readany():
            body += chunk
            if len(body) > self.limits.max_reply_bytes:
                raise StreamBroken(f"the answer is longer than {self.limits.max_reply_bytes} bytes")
        return Reply(response.status, bytes(body), headers.to_client(response.headers))

    @asynccontextmanager
    async def faults(self, charge: Charge, role: Role, deadline_seconds: float | None) -> AsyncIterator[None]:
        """Turns a fault of the connection, silence past the deadline, and the loss of the group into a LegFailure."""
        url = charge.group.url
        try:
            async with asyncio.timeout(deadline_seconds) as limit:
                with charge.group.ends(limit):
                    yield
        except TimeoutError as error:
            charge.unreachable(time.monotonic())
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise _unreachable(role, url, error) from error
            if not charge.group.responds:
                reply = error_reply(503, f"the {role} group has stopped responding", code="engine_unresponsive")
                raise LegFailure(role, url, "unresponsive", reply, retriable=True) from error
            reply = error_reply(504, f"the {role} group did not answer in time", code="deadline_exceeded")
            raise LegFailure(role, url, "deadline", reply, retriable=True) from error
        except (aiohttp.ClientError, OSError, StreamBroken) as error:
            charge.unreachable(time.monotonic())
            raise _unreachable(role, url, error) from error


def _unreachable(role: Role, url: str, error: Exception) -> LegFailure:
    message = f"the connection to the {role} group failed ({type(error).__name__})"
    reply = error_reply(503, message, code="engine_unreachable", retry_after_seconds=1.0)
    return LegFailure(role, url, "unreachable", reply, retriable=True)


def refusal(role: Role, url: str, reply: Reply) -> LegFailure:
    """An engine's error answer: 4xx is the client's to mend and is relayed as it is, 5xx may pass elsewhere."""
    return LegFailure(role, url, "refused", reply, retriable=reply.status >= 500)


def protocol_failure(role: Role, url: str, what: str) -> LegFailure:
    reply = error_reply(502, f"the {role} group broke the protocol: {what}", code="bad_engine_answer")
    return LegFailure(role, url, "protocol", reply, retriable=True)
