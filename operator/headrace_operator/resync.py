"""Compare what the watches showed with what the API server has: finds dead watches and missed deletions.

A watch that falls too far behind starts again with a list, which shows what exists but not what went away meanwhile;
and a connection can die without a word. So every few minutes, and soon after the API server was away, which has made
many watches begin anew, all our objects are listed (from the API server's cache): what is not there any more is dropped
from the store, and every deployment is looked at once. If twice in a row the store has missed something that the list
shows, the watches are dead and the liveness probe says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_operator import metrics, names
from headrace_operator.cluster import Cluster, ClusterError
from headrace_operator.kinds import CHILD_KINDS
from headrace_operator.mirror import key_of_child
from headrace_operator.retries import MAX_PAUSE_SECONDS
from headrace_operator.store import Store
from headrace_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 120.0
# After the API server was away: longer than any watch waits before it is tried again.
RELIST_SECONDS = MAX_PAUSE_SECONDS + 2.0
# Between listing and comparing: what was on its way to the watches arrives.
SETTLE_SECONDS = 10.0

Body = Mapping[str, Any]


class Resync:
    """Runs for ever beside the watches. `namespaces` None: all of them."""

    def __init__(self, cluster: Cluster, store: Store, queue: WorkQueue, namespaces: Sequence[str] | None) -> None:
        self._cluster = cluster
        self._store = store
        self._queue = queue
        self._namespaces: Sequence[str | None] = namespaces or [None]
        self._num_stale_rounds = 0

    @property
    def is_live(self) -> bool:
        """False once the watches have missed changes in two rounds in a row."""
        return self._num_stale_rounds < 2

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cluster.has_returned.wait(), INTERVAL_SECONDS)
                await asyncio.sleep(RELIST_SECONDS)
            self._cluster.has_returned.clear()
            try:
                await self.compare()
            except ClusterError as error:
                # The API server is away; that is no fault of ours, and a restart would not help.
                logger.warning("cannot compare with the API server: %s", error)

    async def compare(self) -> None:
        """One round."""
        listed = {kind: await self._list(kind) for kind in (names.KIND, *CHILD_KINDS)}
        await asyncio.sleep(SETTLE_SECONDS)
        num_stale = 0
        for kind, bodies in listed.items():
            known = {body["metadata"]["uid"]: body for body in self._store.all_of(kind)}
            fresh = {body["metadata"]["uid"]: body for body in bodies}
            for uid, shown in known.items():
                if uid not in fresh and await self._live_uid(kind, shown) != uid:
                    logger.warning("%s %s went away unseen", kind, shown["metadata"]["name"])
                    self._store.forget(shown)
            for uid, body in fresh.items():
                if uid in known:
                    num_stale += _version(known[uid]) < _version(body)
                elif kind == names.KIND or key_of_child(body):  # it may have been deleted since the list
                    num_stale += await self._live_uid(kind, body) == uid
        metrics.STALE_OBJECTS.set(num_stale)
        if num_stale:
            self._num_stale_rounds += 1
            logger.warning("the watches have not shown %d changes", num_stale)
        else:
            self._num_stale_rounds = 0
            metrics.LAST_COMPARISON.set(time.time())
        for key in self._store.deployment_keys():
            self._queue.add(key)

    async def _list(self, kind: str) -> list[Body]:
        bodies: list[Body] = []
        for namespace in self._namespaces:
            if kind == names.KIND:
                bodies += await self._cluster.list_deployments(namespace)
            else:
                bodies += await self._cluster.list_children(kind, namespace)
        return bodies

    async def _live_uid(self, kind: str, body: Body) -> str | None:
        live = await self._cluster.get(kind, body["metadata"]["namespace"], body["metadata"]["name"])
        return live["metadata"]["uid"] if live else None


def _version(body: Body) -> int:
    return int(body["metadata"]["resourceVersion"])
