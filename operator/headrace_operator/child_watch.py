"""Follows the children of all deployments, but for those of kinds that a cluster may lack (`following.py`).

kopf follows the resources themselves. Of a thousand new pods each is shown five times, and what kopf does for an event
besides passing it on costs more processor time than all that the operator decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace_operator.cluster import Cluster, ClusterError, WatchExpired
from headrace_operator.kinds import CHILD_KINDS
from headrace_operator.mirror import Mirror, Place
from headrace_operator.retries import watch_pauses

logger = logging.getLogger(__name__)


class ChildWatch:
    """Fills the mirror. `namespaces` None: all of them."""

    def __init__(self, cluster: Cluster, mirror: Mirror, namespaces: Sequence[str] | None) -> None:
        self._cluster = cluster
        self._mirror = mirror
        self._unlisted: set[Place] = {(kind, namespace) for kind in CHILD_KINDS for namespace in namespaces or (None,)}
        self.is_listed = asyncio.Event()  # all that exist have been seen once

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(*(self._follow(place) for place in tuple(self._unlisted)))

    async def _follow(self, place: Place) -> None:
        """List, then watch; list again whenever the watch has lost the thread. What was seen counts meanwhile."""
        version, pauses = "", watch_pauses()
        while True:
            try:
                if not version:
                    version = await self._mirror.list_all(self._cluster, place)
                    self._unlisted.discard(place)
                    if not self._unlisted:
                        self.is_listed.set()
                version = await self._mirror.watch(self._cluster, place, version)
                pauses = watch_pauses()
            except WatchExpired as error:
                logger.info("%s", error)
                version = ""
            except ClusterError as error:
                logger.warning("%s", error)
                version = ""  # a broken watch has not told how far it came
                await asyncio.sleep(next(pauses))
