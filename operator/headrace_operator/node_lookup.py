"""Asking the API server for nodes whose pods look lost, briefly remembered: hundreds of pods share a silent node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from headrace_operator.cluster import Cluster, Refused
from headrace_operator.node_loss import GONE, silent_since
from headrace_operator.watching import pages

logger = logging.getLogger(__name__)

REMEMBER_SECONDS = 5.0
# The right to read nodes is missing (an operator that serves single namespaces): not asked again for so long.
REFUSED_SECONDS = 600.0
_MAX_REMEMBERED = 4096


class NodeLookup:
    """Shared by all passes of one process."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, tuple[float, float | None]] = {}  # when asked, and since when silent
        self._refused_until = 0.0
        self._looked_at = float("-inf")  # when all nodes were looked at, and whether one of them was ready
        self._answers = True
        self._alone_at = float("-inf")  # when none was

    async def silent(self, nodes: Iterable[str]) -> dict[str, float]:
        """Since when (epoch seconds) those of `nodes` are silent that are. Raises ClusterError.

        While no node at all answers, the control plane was away and the nodes have not found it again yet: their
        silence begins to count when one has. (Kubernetes itself evicts nothing then.) Without the right to read nodes
        none is silent: pods are then lost by overstaying their deletion alone.
        """
        now = self._clock()
        if now < self._refused_until:
            return {}
        wanted = list(nodes)
        unknown = [name for name in wanted if now - self._known.get(name, (float("-inf"), None))[0] >= REMEMBER_SECONDS]
        if len(self._known) + len(unknown) > _MAX_REMEMBERED:
            self._known.clear()
            unknown = wanted
        try:
            bodies = await asyncio.gather(*(self._cluster.get_node(name) for name in unknown))
        except Refused as error:
            logger.warning("nodes cannot be read, so a lost one is noticed later: %s", error)
            self._refused_until = now + REFUSED_SECONDS
            return {}
        self._known |= {name: (now, silent_since(body)) for name, body in zip(unknown, bodies, strict=True)}
        found = {name: self._known[name][1] for name in wanted}
        silent = {name: since for name, since in found.items() if since is not None}
        if any(since != GONE for since in silent.values()) and not await self._does_any_answer(now):
            self._alone_at = now
        return {name: max(since, self._alone_at) if since != GONE else since for name, since in silent.items()}

    async def _does_any_answer(self, now: float) -> bool:
        """Whether any node of the cluster is ready, as of a few seconds ago."""
        if now - self._looked_at >= REMEMBER_SECONDS:
            answers = False
            async for bodies, _ in pages(self._cluster, "Node"):
                answers = any(silent_since(body) is None for body in bodies)
                if answers:
                    break
            self._looked_at, self._answers = now, answers
        return self._answers
