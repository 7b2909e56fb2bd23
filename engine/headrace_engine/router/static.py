"""A fixed list of endpoints. Nobody else watches these engines, so the router asks each whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from headrace_engine.router.engines import Engines
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.group import Endpoint
from headrace_engine.router.sse import StreamBroken

PROBE_SECONDS = 1.0  # between probes of a ready engine
STARTING_PROBE_SECONDS = 0.25  # of one that is not ready
PROBE_TIMEOUT_SECONDS = 5.0
MAX_MISSED_PROBES = 3  # a busy engine may be late; an answer of 503 counts at once

logger = logging.getLogger(__name__)


class StaticSource:
    """Keeps the readiness of a fixed list of endpoints."""

    def __init__(self, endpoints: Sequence[Endpoint], engines: Engines, fleet: Fleet) -> None:
        self._endpoints = endpoints
        self._engines = engines
        self._fleet = fleet
        self._fleet.replace(endpoints)

    async def run(self) -> None:
        """Probe for ever."""
        async with asyncio.TaskGroup() as group:
            for endpoint in self._endpoints:
                group.create_task(self._follow(endpoint))

    async def _follow(self, endpoint: Endpoint) -> None:
        ready, num_missed = False, 0
        while True:
            answer = await self._probe(endpoint)
            num_missed = num_missed + 1 if answer is None else 0
            now_ready = answer if answer is not None else ready and num_missed < MAX_MISSED_PROBES
            if now_ready != ready:
                logger.info("%s group at %s is %s", endpoint.role, endpoint.url, "ready" if now_ready else "not ready")
            ready = now_ready
            self._fleet.set_ready(endpoint.role, endpoint.url, ready)
            await asyncio.sleep(PROBE_SECONDS if ready else STARTING_PROBE_SECONDS)

    async def _probe(self, endpoint: Endpoint) -> bool | None:
        """True or False as the engine says; None if it does not answer."""
        try:
            reply = await self._engines.ask("GET", endpoint.url, "/ready", {}, PROBE_TIMEOUT_SECONDS)
        except (aiohttp.ClientError, OSError, TimeoutError, StreamBroken):
            return None
        return reply.status == 200
