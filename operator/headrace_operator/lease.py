"""Holding the Lease that lets one operator of several work: take it, keep it renewed, give it back."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn

from headrace_operator import metrics
from headrace_operator.cluster import Cluster, ClusterError
from headrace_operator.election import RETRY_SECONDS, Election, held, released

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 3.0
LEASE = "Lease"


class LeaseLost(ClusterError):
    """Another operator has taken over; this one must end."""


class Lease:
    """One Lease and one candidate for it."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str) -> None:
        self._cluster = cluster
        self._where = (namespace, name)
        self._election = Election(identity)
        self._is_held = False
        self.is_standing_by = False  # someone else holds it, as far as was seen at the last look

    def seconds_left(self) -> float:
        """How long a write that starts now may take; 0 if none may start. Cluster asks before every write."""
        return self._election.seconds_left(time.monotonic())

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until the Lease is ours; False if told to stop first."""
        told = ""
        while not stop.is_set():
            try:
                holder = await self._try()
                self.is_standing_by = bool(holder)
            except ClusterError as error:
                self.is_standing_by = False
                holder = f"nobody knows whom: {error}"
            if not holder:
                logger.info("holding lease %s/%s as %s", *self._where, self._election.identity)
                metrics.IS_LEADER.set(1)
                self._is_held = True
                return True
            if holder != told:
                logger.info("standing by: lease %s/%s is held by %s", *self._where, holder)
                told = holder
            try:
                await asyncio.wait_for(stop.wait(), RETRY_SECONDS)
            except TimeoutError:
                continue
        return False

    async def keep(self) -> NoReturn:
        """Renew for ever. Raises LeaseLost when someone else holds it. While the API server is away it only tries on:
        nobody else can take the Lease either, and no write is started meanwhile (`seconds_left`)."""
        failure = ""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                holder = await self._try()
            except ClusterError as error:
                if not failure:
                    logger.warning("the lease cannot be renewed, writes pause soon: %s", error)
                failure = str(error)
                continue
            if holder:
                self._is_held = False
                raise LeaseLost(f"lease {'/'.join(self._where)} was taken by {holder}")
            if failure:
                logger.info("the lease is renewed again")
                failure = ""

    async def release(self) -> None:
        """Give it back, so that the next operator starts at once. A failure only costs that one some seconds."""
        metrics.IS_LEADER.set(0)
        if not self._is_held:
            return
        self._is_held = False
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                lease = await self._cluster.get(LEASE, *self._where)
                if lease and lease["spec"].get("holderIdentity") == self._election.identity:
                    await self._cluster.replace(released(lease))
        except (ClusterError, TimeoutError) as error:
            logger.warning("the lease was not given back: %s", error)

    async def _try(self) -> str:
        """Take or renew it; the holder if that is someone else, or empty."""
        sent_at = time.monotonic()
        try:
            lease = await self._cluster.get(LEASE, *self._where)
        except ClusterError:
            self._election.lose_sight()
            raise
        self._election.observe(lease, time.monotonic())
        if not self._election.may_take(lease, time.monotonic()):
            return str((lease or {})["spec"]["holderIdentity"])
        body: dict[str, Any] = held(lease, *self._where, self._election.identity, time.time())
        await (self._cluster.replace(body) if lease else self._cluster.create(body))
        self._election.renewed(sent_at)
        return ""
