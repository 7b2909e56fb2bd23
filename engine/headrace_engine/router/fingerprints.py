"""Learns every group's KV fingerprint from the group itself, so that pairs are chosen and not found by trial.

Without it a decode group whose cache no prefill group shares hands out tickets in vain, and prefill groups are asked
one after the other. While a deployment moves from one cache to another both kinds are there. What an engine says here
is what it writes into its tickets; a group that has not said anything yet is taken for one that fits.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec

from headrace_engine.core import Role
from headrace_engine.router.engines import Engines
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.group import Group
from headrace_engine.router.sse import StreamBroken

POLL_SECONDS = 0.25  # how soon a group that has become ready is asked
RETRY_SECONDS = 5.0  # after an answer without a fingerprint, or none
ASK_SECONDS = 2.0
MAX_AT_ONCE = 16


class _State(msgspec.Struct):
    fingerprint: str = ""


class FingerprintLearner:
    """Asks ready groups that have not told theirs; `run` for as long as the router lives."""

    def __init__(self, fleet: Fleet, engines: Engines) -> None:
        self._fleet = fleet
        self._engines = engines
        self._not_before: dict[str, float] = {}  # URL -> monotonic seconds

    async def run(self) -> None:
        while True:
            await self.learn()
            await asyncio.sleep(POLL_SECONDS)

    async def learn(self) -> None:
        """One round: ask those that are due."""
        now = time.monotonic()
        groups = [*self._fleet.groups(Role.DECODE), *self._fleet.groups(Role.PREFILL)]
        self._not_before = {g.url: self._not_before[g.url] for g in groups if g.url in self._not_before}
        due = [
            group
            for group in groups
            if group.endpoint.ready and not group.fingerprint and self._not_before.get(group.url, 0.0) <= now
        ]
        await asyncio.gather(*(self._ask(group) for group in due[:MAX_AT_ONCE]))

    async def _ask(self, group: Group) -> None:
        self._not_before[group.url] = time.monotonic() + RETRY_SECONDS
        try:
            reply = await self._engines.ask("GET", group.url, "/state", {}, ASK_SECONDS)
            if reply.status == 200:
                group.fingerprint = msgspec.json.decode(reply.body, type=_State).fingerprint
        except (aiohttp.ClientError, OSError, TimeoutError, StreamBroken, msgspec.MsgspecError):
            pass  # it is asked again; until then it counts as one that fits
