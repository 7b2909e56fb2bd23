"""Fake engines that speak the leg protocol over real sockets, with scripted faults, and a router in front of them.

A fake counts its open legs, so that a test can say that none is left.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from headrace_engine.core import Role
from headrace_engine.router.app import Router
from headrace_engine.router.config import Limits
from headrace_engine.router.group import Endpoint
from headrace_engine.router.static import StaticSource

QUICK = Limits(
    request_seconds=20.0,
    connect_seconds=1.0,
    ticket_seconds=1.0,
    prefill_seconds=1.0,
    idle_seconds=1.0,
    drain_seconds=1.0,
)
PATH = "/v1/completions"
HANG = 30.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def openai_error(message: str, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


class Wire:
    """Stands for NIXL: prefill completes a ticket, and the decode group that issued it hears of that."""

    def __init__(self) -> None:
        self.pushed: dict[str, asyncio.Event] = {}


class FakeEngine:
    """A group's leader. `faults` are used up one per leg; when empty, legs succeed.

    Faults of every role: `503`, `500`, `400`, `429`, `hang`, `die`. Decode: `die_after_ticket`, `hang_after_ticket`,
    `report_retriable`, `report_final`, `lease` (an error if no KV comes for 0.1 s), `die_mid_stream`, `die_mid_event`,
    `hang_mid_stream`, `no_done`, `no_stream`, `no_ticket`, `slow`. Prefill: `409:CODE`, `slow`.
    """

    def __init__(self, role: Role, wire: Wire) -> None:
        self.role = role
        self.wire = wire
        self.faults: deque[str] = deque()
        self.always: str | None = None  # a fault of every leg
        self.fingerprint = "F1"
        self.tells_fingerprint = False  # in /state
        self.wants_kv = True
        self.num_prompts = 1  # of every request: a ticket for each, each when the KV of the one before it has come
        self.tokens = ["a", "b", "c"]
        self.events: list[bytes] = []  # a stream's, instead of tokens and [DONE]
        self.token_seconds = 0.0
        self.may_send: asyncio.Semaphore | None = None  # one token for each release
        self.open_legs = 0
        self.num_legs = 0
        self.ready = True
        self.seen: list[tuple[CIMultiDict[str], bytes]] = []
        self.sent_at: list[float] = []
        self.url = ""
        self.running = asyncio.Event()  # cleared: its machine hangs; connections stay open and nothing is said
        self.running.set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30, middlewares=[self._hang])
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/{tail:.*}", self._leg)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/state", self._state)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _hang(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await self.running.wait()
        response = await handler(request)
        await self.running.wait()
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _state(self, _: web.Request) -> web.Response:
        if not self.tells_fingerprint:
            return web.Response(status=404)
        return web.json_response({"role": self.role, "fingerprint": self.fingerprint})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.seen.append((request.headers.copy(), await request.read()))
        fault = self.always or (self.faults.popleft() if self.faults else "")
        if fault:
            return web.json_response(openai_error(f"fault {fault}"), status=int(fault))
        return web.json_response({"count": 1, "tokens": [7]})

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        self.num_legs += 1
        self.open_legs += 1
        try:
            body = await request.read()
            self.seen.append((request.headers.copy(), body))
            fault = self.always or (self.faults.popleft() if self.faults else "")
            if fault == "die":
                await self._die(request)
            elif fault == "hang":
                await asyncio.sleep(HANG)
            elif fault[:3] in ("400", "429", "500", "503", "409"):
                code = fault[4:] or None
                return web.json_response(openai_error(f"fault {fault}", code), status=int(fault[:3]))
            leg = request.headers.get("x-headrace-leg")
            if leg == "decode":
                return await self._decode(request, body, fault)
            if leg == "prefill":
                return await self._prefill(body, fault)
            return await self._whole(request, body, fault)
        finally:
            self.open_legs -= 1

    async def _die(self, request: web.Request) -> None:
        await asyncio.sleep(0.02)  # what was written before goes out first
        request.transport.abort()
        await asyncio.sleep(HANG)  # ends at once: a lost connection cancels its handler

    async def _prefill(self, body: bytes, fault: str) -> web.Response:
        ticket = json.loads(body)["headrace_ticket"]
        if ticket["fingerprint"] != self.fingerprint:
            return web.json_response(openai_error("another layout", "fingerprint_mismatch"), status=409)
        if fault == "slow":
            await asyncio.sleep(0.2)
        self.wire.pushed[ticket["incarnation"]].set()
        return web.json_response({"status": "pushed", "num_cached_tokens": 0})

    async def _decode(self, request: web.Request, body: bytes, fault: str) -> web.StreamResponse:
        if fault == "no_stream":
            return web.json_response({"choices": []})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        key = ""
        for index in range(self.num_prompts):
            if key:
                await self.wire.pushed[key].wait()
            key = uuid.uuid4().hex
            self.wire.pushed[key] = asyncio.Event()
            agent = base64.b64encode(b"\x00agent\xff").decode()
            ticket = {"incarnation": key, "fingerprint": self.fingerprint, "peer": {"agent_metadata": agent}}
            if self.num_prompts > 1:
                ticket |= {"prompt_index": index, "num_prompts": self.num_prompts}
            name = "token" if fault == "no_ticket" else "ticket"
            if not self.wants_kv:
                self.wire.pushed[key].set()
            await stream.write(f"event: {name}\ndata: {json.dumps(ticket if self.wants_kv else None)}\n\n".encode())
            if fault == "die_after_ticket":
                await self._die(request)
            if fault == "hang_after_ticket":
                await asyncio.sleep(HANG)
        if fault.startswith("report"):
            data = {
                "status": 503 if fault == "report_retriable" else 400,
                "retriable": fault == "report_retriable",
                "body": openai_error(fault),
            }
            await stream.write(f"event: error\ndata: {json.dumps(data)}\n\n".encode())
            await stream.write_eof()
            return stream
        if fault == "lease":
            try:
                await asyncio.wait_for(self.wire.pushed[key].wait(), 0.1)
            except TimeoutError:
                body = openai_error("the lease is past", "kv_transfer_failed")
                data = {"status": 503, "retriable": True, "body": body}
                await stream.write(f"event: error\ndata: {json.dumps(data)}\n\n".encode())
                await stream.write_eof()
                return stream
        await self.wire.pushed[key].wait()
        await self.running.wait()
        if json.loads(body).get("stream"):
            await self._tokens(request, stream, fault)
        else:
            answer = {"status": 200, "body": whole_answer(self.tokens)}
            await stream.write(f"event: response\ndata: {json.dumps(answer)}\n\n".encode())
        await stream.write_eof()
        return stream

    async def _tokens(self, request: web.Request, stream: web.StreamResponse, fault: str) -> None:
        if self.events:
            for event in self.events:
                await stream.write(event)
            return
        for index, token in enumerate(self.tokens):
            if self.token_seconds and index:
                await asyncio.sleep(self.token_seconds)
            if self.may_send is not None:
                await self.may_send.acquire()
            await self.running.wait()
            self.sent_at.append(asyncio.get_running_loop().time())
            await stream.write(token_event(token))
            if index == 1 and fault in ("die_mid_stream", "die_mid_event"):
                if fault == "die_mid_event":
                    await stream.write(b'data: {"choices": [{"te')
                await self._die(request)
            if index == 1 and fault == "hang_mid_stream":
                await asyncio.sleep(HANG)
        if fault != "no_done":
            await stream.write(b"data: [DONE]\n\n")

    async def _whole(self, request: web.Request, body: bytes, fault: str) -> web.StreamResponse:
        if not json.loads(body).get("stream"):
            return web.json_response(whole_answer(self.tokens))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await self._tokens(request, stream, fault)
        await stream.write_eof()
        return stream


def token_event(token: str) -> bytes:
    choice = {"index": 0, "text": token, "finish_reason": None, "delta": {"content": token}}
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def whole_answer(tokens: list[str]) -> dict:
    text = "".join(tokens)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "text": text, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": len(tokens), "total_tokens": 1 + len(tokens)}
    return {"id": "1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice], "usage": usage}


@dataclass
class Rig:
    """A router with its fakes, and a client."""

    router: Router
    base: str
    http: aiohttp.ClientSession
    prefill: list[FakeEngine] = field(default_factory=list)
    decode: list[FakeEngine] = field(default_factory=list)
    unified: list[FakeEngine] = field(default_factory=list)

    @property
    def engines(self) -> list[FakeEngine]:
        return self.prefill + self.decode + self.unified

    def post(self, body: dict | bytes, path: str = PATH, **kwargs):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(self.base + path, data=data, **kwargs)

    async def ask(self, stream: bool = False, **fields) -> tuple[int, bytes]:
        async with self.post({"model": "tiny", "prompt": "x", "stream": stream, **fields}) as response:
            return response.status, await response.read()

    async def settled(self) -> bool:
        """True once no engine has a leg open and the router counts none; False if that does not come about."""
        for _ in range(100):
            live = [group.num_live for group in self.router.fleet.groups()]
            if not any(engine.open_legs for engine in self.engines) and not any(live):
                return True
            await asyncio.sleep(0.01)
        return False

    def outcomes(self) -> dict[str, float]:
        samples = self.router.metrics.requests.collect()[0].samples
        return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}


@asynccontextmanager
async def rig(
    num_prefill: int = 1,
    num_decode: int = 1,
    num_unified: int = 0,
    limits: Limits = QUICK,
    fingerprints: dict[Role, list[str]] | None = None,
) -> AsyncIterator[Rig]:
    """A ready router in front of so many fakes; all of it is gone afterwards. With `fingerprints` they tell them."""
    wire = Wire()
    counts = {Role.PREFILL: num_prefill, Role.DECODE: num_decode, Role.UNIFIED: num_unified}
    fakes = {role: [FakeEngine(role, wire) for _ in range(count)] for role, count in counts.items()}
    for role, told in (fingerprints or {}).items():
        for engine, fingerprint in zip(fakes[role], told, strict=True):
            engine.fingerprint, engine.tells_fingerprint = fingerprint, True
    async with AsyncExitStack() as stack:
        for engine in (engine for group in fakes.values() for engine in group):
            await engine.start()
            stack.push_async_callback(engine.stop)
        router = Router("tiny", limits)
        stack.push_async_callback(router.stop)
        endpoints = [
            Endpoint(role, engine.url, engine.url, ready=False) for role, group in fakes.items() for engine in group
        ]
        port = await router.start("127.0.0.1", 0, StaticSource(endpoints, router.engines, router.fleet))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        result = Rig(router, f"http://127.0.0.1:{port}", http, *(fakes[role] for role in counts))
        await wait_until(lambda: all(group.endpoint.ready for group in router.fleet.groups()))
        yield result


async def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)
