"""Finds groups that have stopped responding, so that no request waits for one until its own deadline.

A machine that hangs keeps its connections open, and one that loses its power closes none. An engine may rightly be
silent for minutes (a long prompt, an answer that is not streamed), but it answers `/health` meanwhile. So a group that
has legs under way and has been silent for a while is asked; if it stays silent it is lost: its legs fail, and no
request is sent to it until it answers again.
"""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from headrace_engine.router.engines import Engines
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.group import Group
from headrace_engine.router.sse import StreamBroken

ASKED_AFTER = 1 / 3  # of the limit: silence after which a group is asked; what is left is for its answer
LOOKS_PER_LIMIT = 15
MAX_AT_ONCE = 64
REFUSED_PAUSE_SECONDS = 1.0  # after a connection that fails at once: what is not there is known by its legs, too

logger = logging.getLogger(__name__)


def is_due(group: Group, now: float, limit_seconds: float) -> bool:
    """Whether to ask this group now: it has been silent with legs under way, or is lost and may be back."""
    if not group.responds:
        return group.endpoint.ready or group.num_live > 0
    return group.num_live > 0 and now - group.heard_at >= limit_seconds * ASKED_AFTER


class LivenessWatch:
    """Asks silent groups; `run` for as long as the router lives."""

    def __init__(self, fleet: Fleet, engines: Engines) -> None:
        self._fleet = fleet
        self._engines = engines
        self._limit_seconds = engines.limits.unresponsive_seconds
        self._asked: dict[int, asyncio.Task[None]] = {}  # by id of the group

    async def run(self) -> None:
        try:
            while True:
                self.look()
                await asyncio.sleep(self._limit_seconds / LOOKS_PER_LIMIT)
        finally:
            for task in self._asked.values():
                task.cancel()

    def look(self) -> None:
        """Ask those that are due and are not being asked."""
        self._asked = {key: task for key, task in self._asked.items() if not task.done()}
        now = time.monotonic()
        for group in self._fleet.watched():
            if len(self._asked) >= MAX_AT_ONCE:
                return
            if id(group) not in self._asked and is_due(group, now, self._limit_seconds):
                self._asked[id(group)] = asyncio.create_task(self._ask(group))

    async def _ask(self, group: Group) -> None:
        """Ask until there is any answer, or lose the group."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_seconds * (1 - ASKED_AFTER)):
                await self._hear(group)
            if not group.responds:
                logger.info("%s group %s responds again", group.endpoint.role, group.name)
            group.heard()
        except TimeoutError:
            if group.heard_at < began and group.responds:
                logger.warning("%s group %s has stopped responding", group.endpoint.role, group.name)
                group.lose()

    async def _hear(self, group: Group) -> None:
        """Return at its first answer, whatever it is."""
        while True:
            try:
                await self._engines.ask("GET", group.url, "/health", {}, self._limit_seconds)
                return
            except (aiohttp.ClientError, OSError, StreamBroken, TimeoutError):
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
