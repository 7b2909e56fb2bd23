"""Ends pods that nobody else ends: those that outlived their deployment, and those that only Kueue's finalizer keeps.

Which they are is decided by `stragglers.py` and `gangs.py`; here it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headrace_operator.cluster import Cluster, ClusterError
from headrace_operator.gangs import is_held, others_finalizers
from headrace_operator.node_lookup import NodeLookup
from headrace_operator.observe import is_of_name
from headrace_operator.pace import Pace
from headrace_operator.stragglers import overdue, stragglers, suspects
from headrace_operator.workqueue import Key

logger = logging.getLogger(__name__)

Body = dict[str, Any]

# Kueue's own webhook is asked for every change of its pods, and may be away.
RETRY_SECONDS = 3.0


class Leftovers:
    """For all deployments. `nodes`: what is known of nodes that pods are on."""

    def __init__(self, cluster: Cluster, nodes: NodeLookup, pace: Pace) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._pace = pace

    async def end(self, key: Key, uid: str, objects: Sequence[Body], now: float) -> float | None:
        """End what is left over among `objects`; seconds after which to look again. `uid`: of the deployment that is
        there to stay, empty if none is. Raises ClusterError."""
        waits = [await self._end_stragglers(key, uid, objects, now), await self._release(key, objects, now)]
        return min((wait for wait in waits if wait), default=None)

    async def _end_stragglers(self, key: Key, uid: str, objects: Sequence[Body], now: float) -> float | None:
        """Remove by force what a former deployment of this name, or this one as it goes, left on silent nodes."""
        with self._pace.thinking(key, now):
            found = stragglers(key.name, uid, objects)
        silent = await self._nodes.silent(suspects(found, now))
        gone, wait = overdue(found, silent, now)
        for deletion in gone:
            logger.warning("%s/%s: pod %s outlived its deployment and is removed", *key, deletion.pod_name)
            await self._cluster.delete("Pod", key.namespace, deletion.pod_name, deletion.uid, deletion.grace_seconds)
        return wait

    async def _release(self, key: Key, objects: Sequence[Body], now: float) -> float | None:
        """Take Kueue's finalizer off pods that it would keep for ever. Where that fails it is tried again, and nothing
        else is kept from being done."""
        with self._pace.thinking(key, now):
            held = [body for body in objects if is_held(body) and is_of_name(key.name, body)]
        wait = None
        for body in held:
            try:
                await self._cluster.set_finalizers(body, others_finalizers(body))
            except ClusterError as error:
                logger.warning("%s/%s: %s", *key, error)
                wait = RETRY_SECONDS
        return wait
