"""Watches nodes and pods of the whole cluster while a deployment with a placement needs to know what room there is.

Without such a deployment nothing is watched and no right to do so is needed. A deployment that waits for room is looked
at again when some may have become free (a pod gone, a node new or changed) or when its turn may have come, not by
the clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from headrace_operator.admission import Admission, Capacity
from headrace_operator.census import Census
from headrace_operator.cluster import Cluster, ClusterError, Refused, WatchExpired
from headrace_operator.ledger import Ledger
from headrace_operator.watching import changes, pages
from headrace_operator.workqueue import Key

logger = logging.getLogger(__name__)

_KINDS = ("Node", "Pod")
# In a busy cluster room becomes free all the time; those that wait are woken at most this often.
WAKE_SECONDS = 1.0
RETRY_SECONDS = 5.0
# A right that is missing is granted by a person.
REFUSED_RETRY_SECONDS = 30.0


class Inventory:
    """What room there is, who waits for some, and who was given some. One event loop, no locks: between asking for
    `capacity` and `record` of what became of it nothing may be awaited."""

    def __init__(self, cluster: Cluster, wake: Callable[[Key], None], clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._wake = wake
        self._clock = clock
        self._users: set[Key] = set()
        self._waiting: dict[Key, None] = {}  # in the order in which they began to wait
        self._ledger = Ledger()
        self._needed = asyncio.Event()
        self._unneeded = asyncio.Event()
        self._freed = asyncio.Event()
        self._reset()

    def _reset(self) -> None:
        self._census = Census()
        self._listed: set[str] = set()
        self._problems: dict[str, str] = {}  # by kind: why it is not known

    def forget(self, key: Key) -> None:
        """The deployment is gone, or has no placement (any more)."""
        if key not in self._users:
            return
        self._users.remove(key)
        self._waiting.pop(key, None)
        self._ledger.forget(key)
        self._freed.set()
        if not self._users:
            self._needed.clear()
            self._unneeded.set()
            self._reset()  # at once: from here on nobody keeps it up to date

    def capacity(self, key: Key) -> Capacity | None:
        """What there is for a deployment with a placement. None: nothing is known yet; the key is woken when it is."""
        self._users.add(key)
        self._unneeded.clear()
        self._needed.set()
        if self._problems:
            return Capacity(problem=next(iter(self._problems.values())))
        if len(self._listed) < len(_KINDS):
            self._waiting.setdefault(key)
            return None
        claims = self._ledger.open_claims(self._census.uid_of, self._clock())
        others = [(claim.shape, claim.count) for claim in claims if not (claim.is_held and claim.key == key)]
        return Capacity(
            rooms=tuple(self._census.rooms(others)),
            unbound=self._census.unbound() | {claim.shape for claim in claims if not claim.is_held},
            not_before=self._ledger.not_before(key),
        )

    def record(self, key: Key, admission: Admission) -> None:
        """What a pass made of it."""
        now = self._clock()
        self._ledger.claim(key, admission.claims, self._census.uid_of, now)
        self._ledger.take_back(key, admission.taken_back, now)
        if admission.is_complete:
            self._waiting.pop(key, None)
        else:
            self._waiting.setdefault(key)

    def release(self, key: Key) -> None:
        """Some of the pods that the last pass wanted were not made."""
        self._ledger.release(key)
        self._freed.set()

    async def run(self) -> None:
        """For ever: watch while it is needed."""
        while True:
            await self._needed.wait()
            tasks = [asyncio.ensure_future(self._follow(kind)) for kind in _KINDS]
            tasks.append(asyncio.ensure_future(self._wake_those_that_wait()))
            stop = asyncio.ensure_future(self._unneeded.wait())
            try:
                done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()  # raises what ended it: none of them ends by itself
            finally:
                for task in (stop, *tasks):
                    task.cancel()
                await asyncio.gather(stop, *tasks, return_exceptions=True)
            self._reset()

    async def _wake_those_that_wait(self) -> None:
        while True:
            await self._freed.wait()
            self._freed.clear()
            for key in list(self._waiting):
                self._wake(key)
            await asyncio.sleep(WAKE_SECONDS)

    async def _follow(self, kind: str) -> None:
        """List, then watch; list again whenever the watch has lost the thread."""
        while True:
            pause = 0.0
            try:
                version = await self._list(kind)
                while True:
                    version = await self._watch(kind, version)
            except WatchExpired as error:
                logger.info("%s", error)
            except Refused as error:
                self._fail(
                    kind,
                    "spec.placement needs the right to list and watch all nodes and all pods of the cluster; grant it "
                    f"(value capacity.clusterWide of the chart) or remove spec.placement: {error}",
                )
                pause = REFUSED_RETRY_SECONDS
            except ClusterError as error:
                if kind not in self._listed:
                    self._fail(kind, f"what the cluster has room for is not known: {error}")
                logger.warning("%s", error)
                pause = RETRY_SECONDS
            await asyncio.sleep(pause + random.uniform(0.0, 1.0))

    def _fail(self, kind: str, problem: str) -> None:
        self._problems[kind] = problem
        for key in self._users:
            self._waiting.setdefault(key)
        self._freed.set()

    async def _list(self, kind: str) -> str:
        seen, version = set(), ""
        async for bodies, page_version in pages(self._cluster, kind):
            version = version or page_version
            for body in bodies:
                seen.add(body["metadata"]["name" if kind == "Node" else "uid"])
                self._see(kind, body)
        if kind == "Node":
            self._census.keep_only(node_names=seen)
        else:
            self._census.keep_only(pod_uids=seen)
        self._listed.add(kind)
        self._problems.pop(kind, None)
        if len(self._listed) == len(_KINDS) and not self._problems:
            self._freed.set()
        return version

    async def _watch(self, kind: str, version: str) -> str:
        async for change, body in changes(self._cluster, kind, version):
            version = body["metadata"]["resourceVersion"]
            if change == "DELETED":
                self._lose(kind, body)
            elif change != "BOOKMARK":
                self._see(kind, body)
        return version

    def _see(self, kind: str, body: dict[str, object]) -> None:
        is_freed = self._census.see_node(body) if kind == "Node" else self._census.see_pod(body)
        if is_freed:
            self._freed.set()

    def _lose(self, kind: str, body: dict[str, object]) -> None:
        if kind == "Node":
            self._census.lose_node(body["metadata"]["name"])  # type: ignore[index]
        elif self._census.lose_pod(body):
            self._freed.set()
