"""A request from the door to its last byte: attempts on fresh groups until one has an answer, all within a deadline."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from aiohttp import web

from headrace_engine.router import headers
from headrace_engine.router.attempt import Attempt
from headrace_engine.router.body import BadBody, check_body
from headrace_engine.router.config import Limits
from headrace_engine.router.engines import Engines
from headrace_engine.router.exchange import ClientGone, Exchange
from headrace_engine.router.fleet import Fleet, NoGroup
from headrace_engine.router.metrics import Metrics
from headrace_engine.router.replies import LegFailure, Reply, error_reply

logger = logging.getLogger(__name__)


class Relay:
    """Serves the generation routes. `exchanges` are the requests in flight."""

    def __init__(self, fleet: Fleet, engines: Engines, limits: Limits, metrics: Metrics) -> None:
        self._fleet = fleet
        self._engines = engines
        self._limits = limits
        self._metrics = metrics
        self.exchanges: set[Exchange] = set()
        self.draining = False  # clients are sent away with their answers
        self._is_over = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The aiohttp handler. Cancelled when the client leaves, which closes all legs."""
        exchange = Exchange(request, headers.request_id(request.headers))
        refusal = self._refuse_at_the_door()
        self.exchanges.add(exchange)
        self._idle.clear()
        outcome = "client_gone"
        try:
            if refusal is not None:
                response = await exchange.reply(refusal)
            else:
                response = await self._serve_in_time(exchange)
            outcome = _outcome(exchange)
            return response
        except ClientGone:
            return exchange.response or web.Response(status=499)  # nobody reads it
        finally:
            if outcome == "client_gone":
                exchange.abort()
            self.exchanges.discard(exchange)
            if not self.exchanges:
                self._idle.set()
            self._metrics.finished(outcome, time.monotonic() - exchange.started_at, exchange.first_byte_seconds)

    def _refuse_at_the_door(self) -> Reply | None:
        if self._is_over:
            return error_reply(503, "the router is shutting down", retry_after_seconds=1.0)
        if len(self.exchanges) >= self._limits.max_in_flight:
            message = f"{self._limits.max_in_flight} requests are in flight already"
            return error_reply(429, message, code="overloaded", retry_after_seconds=1.0)
        return None

    async def _serve_in_time(self, exchange: Exchange) -> web.StreamResponse:
        try:
            async with exchange.limit(self._limits.request_seconds):
                return await self._serve(exchange)
        except TimeoutError:
            if exchange.response is None:
                return await exchange.reply(error_reply(504, exchange.timeout_reason, code="deadline_exceeded"))
            await exchange.break_off(exchange.timeout_reason, "deadline_exceeded")
            return exchange.response

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        try:
            exchange.body = await exchange.request.read()
            exchange.wants_stream = check_body(exchange.body)
        except BadBody as error:
            return await exchange.reply(error_reply(400, str(error)))
        except web.RequestPayloadError as error:
            return await exchange.reply(error_reply(400, f"the request body cannot be read: {error}"))
        except web.HTTPRequestEntityTooLarge:
            message = f"the request body is larger than {self._limits.max_body_bytes} bytes"
            return await exchange.reply(error_reply(413, message, code="request_too_large"))
        return await self._try_groups(exchange)

    async def _try_groups(self, exchange: Exchange) -> web.StreamResponse:
        """Up to `max_attempts` attempts; no group that failed this request is asked again.

        A group that turns the request away because it is leaving or not there yet has done nothing for it, so that is
        no attempt: while many groups are replaced, several may do so in a row.
        """
        tried: set[str] = set()
        avoid: set[str] = set()
        last: Reply | None = None
        num_failures = 0
        for number in itertools.count(1):
            attempt = Attempt(self._fleet, self._engines, self._metrics, exchange, number)
            try:
                return await attempt.run(tried, avoid)
            except NoGroup as error:
                no_group = error_reply(503, str(error), code="no_group", retry_after_seconds=error.retry_after_seconds)
                return await exchange.reply(last or no_group)
            except LegFailure as failure:
                self._metrics.leg_failures.labels(failure.role, failure.cause).inc()
                last = failure.reply
                if not failure.retriable:
                    break
                logger.warning("request %s, attempt %d: %s", exchange.request_id, number, failure)
                tried.add(failure.url)
                avoid |= attempt.used
                num_failures += not failure.is_turned_away
            if num_failures >= self._limits.max_attempts:
                break
            self._metrics.retries.inc()
        assert last is not None
        return await exchange.reply(last)

    async def wait_idle(self, seconds: float) -> bool:
        """True as soon as no request is in flight; False if one still is after so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire_all(self, reason: str) -> None:
        """End every request in flight now, each with an error that says why, and take no more."""
        self._is_over = True
        for exchange in list(self.exchanges):
            exchange.expire(reason)


def _outcome(exchange: Exchange) -> str:
    """One word for the metric: how the exchange ended for the client."""
    assert exchange.response is not None
    status = exchange.response.status
    if exchange.broken:
        return "broken"
    if status < 400:
        return "ok"
    if status == 504:
        return "deadline"
    return "refused" if status < 500 else "failed"
