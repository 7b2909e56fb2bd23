"""The router's HTTP surface and its life: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from headrace_engine.router import headers
from headrace_engine.router.config import Limits
from headrace_engine.router.engines import Engines
from headrace_engine.router.fingerprints import FingerprintLearner
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.liveness import LivenessWatch
from headrace_engine.router.metrics import CONTENT_TYPE, Metrics
from headrace_engine.router.relay import Relay
from headrace_engine.router.replies import JSON, Reply, error_reply
from headrace_engine.router.sse import StreamBroken

GENERATION_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
TOKEN_ROUTES = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
ASK_TIMEOUT_SECONDS = 10.0  # for answers that need no generation
LISTEN_BACKLOG = 4096
STOP_SECONDS = 3.0  # for requests to end once they have been told to

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Whoever tells the fleet which endpoints exist."""

    async def run(self) -> None: ...


class Router:
    """One router process without its source of endpoints. `fleet` and `engines` are for that source."""

    def __init__(self, model: str | None, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.fleet = Fleet()
        self.engines = Engines(limits)
        self.metrics = Metrics(self.fleet)
        self.relay = Relay(self.fleet, self.engines, limits, self.metrics)
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int, source: Source) -> int:
        """Listen and follow `source`; returns the port, which is chosen if `port` is 0. Raises OSError."""
        runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS
        )
        self._runner = runner
        await runner.setup()
        self._site = web.TCPSite(runner, host, port, backlog=LISTEN_BACKLOG)
        await self._site.start()
        learner = FingerprintLearner(self.fleet, self.engines)
        watch = LivenessWatch(self.fleet, self.engines)
        for work in (source.run(), learner.run(), watch.run()):
            task = asyncio.create_task(work)
            task.add_done_callback(_report_end)
            self._tasks.append(task)
        bound: int = runner.addresses[0][1]
        return bound

    async def drain(self) -> None:
        """Send clients away, accept no more, let requests in flight end, and end those that have not within the limit.

        A connection that a client keeps cannot just be closed: a request that is on its way on it would be lost. So as
        long as anything is in flight such connections are served, and each answer is the last one on its own.
        """
        self.relay.draining = True
        await asyncio.sleep(self.limits.leave_seconds)
        if self._site is not None:
            await self._site.stop()
        if not await self.relay.wait_idle(self.limits.drain_seconds):
            logger.warning("%d requests did not end in time", len(self.relay.exchanges))
            self.relay.expire_all("the router is shutting down")
            await self.relay.wait_idle(STOP_SECONDS)
        if self._runner is not None and self._runner.server is not None:
            self._runner.server.pre_shutdown()  # closes connections that wait for another request

    async def stop(self) -> None:
        """Close everything now; requests still in flight are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engines.close()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.max_body_bytes, middlewares=[_openai_errors])
        for path in GENERATION_ROUTES:
            app.router.add_post(path, self.relay.handle)
        for path in TOKEN_ROUTES:
            app.router.add_post(path, self._tokens)
        app.on_response_prepare.append(self._send_away)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/synced", self._synced)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state", self._state)
        return app

    async def _send_away(self, _: web.Request, response: web.StreamResponse) -> None:
        if self.relay.draining:
            response.force_close()
            response.headers["Connection"] = "close"

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        missing = self.fleet.missing()
        if self.relay.draining:
            return _json({"status": "draining"}, status=503)
        if missing:
            return _json({"status": "waiting", "missing_roles": missing}, status=503)
        return _json({"status": "ready"})

    async def _synced(self, _: web.Request) -> web.Response:
        """Whether to send requests here. While a role has no group a router still must be reached: only it can say so,
        where a Service without endpoints refuses connections. A router that leaves is still to be reached, too: it is
        out of the Service already, unless there is no other."""
        if not self.fleet.synced:
            return _json({"status": "learning the fleet"}, status=503)
        return _json({"status": "synced"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _state(self, _: web.Request) -> web.Response:
        return _json(
            {
                "model": self.model,
                "synced": self.fleet.synced,
                "draining": self.relay.draining,
                "missing_roles": self.fleet.missing(),
                "in_flight": len(self.relay.exchanges),
                "roles": self.fleet.snapshot(),
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        """What a ready engine says; all of a deployment serve the same model. Without one, what the router knows."""
        reply = await self._ask_any(request, None)
        if reply is None and self.model is not None:
            model = {"id": self.model, "object": "model", "created": 0, "owned_by": "headrace"}
            return _json({"object": "list", "data": [model]})
        return _respond(reply or error_reply(503, "no group is ready", code="no_group", retry_after_seconds=1.0))

    async def _tokens(self, request: web.Request) -> web.Response:
        """Tokenizing generates nothing: any engine of any role can do it."""
        try:
            body = await request.read()
        except web.RequestPayloadError as error:
            return _respond(error_reply(400, f"the request body cannot be read: {error}"))
        except web.HTTPRequestEntityTooLarge:
            message = f"the request body is larger than {self.limits.max_body_bytes} bytes"
            return _respond(error_reply(413, message, code="request_too_large"))
        reply = await self._ask_any(request, body)
        return _respond(reply or error_reply(503, "no group is ready", code="no_group", retry_after_seconds=1.0))

    async def _ask_any(self, request: web.Request, body: bytes | None) -> Reply | None:
        """The first answer of a ready group that is no failure of its own; the least loaded are asked first."""
        request_id = headers.request_id(request.headers)
        leg_headers = headers.to_engine(request.headers, request_id, None)
        groups = (group for group in self.fleet.groups() if group.endpoint.ready and group.responds)
        ready = sorted(groups, key=lambda group: group.num_live)
        for group in ready[: self.limits.max_attempts]:
            try:
                reply = await self.engines.ask(
                    request.method, group.url, request.path, leg_headers, ASK_TIMEOUT_SECONDS, body
                )
            except (aiohttp.ClientError, OSError, TimeoutError, StreamBroken):
                continue
            if reply.status < 500:
                reply.headers[headers.REQUEST_ID] = request_id
                return reply
        return None


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors outside the relay, in the body that clients parse."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return _respond(error_reply(404, f"there is no route {request.path}"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        reply = error_reply(405, f"{request.path} takes {allowed}, not {request.method}")
        return _respond(Reply(reply.status, reply.body, {**reply.headers, "Allow": allowed}))


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), headers={"Content-Type": JSON})


def _respond(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers=reply.headers)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the groups are followed no more; the last known ones stay", exc_info=error)
