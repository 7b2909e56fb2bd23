"""Follows our objects of kinds that a cluster may lack, and knows which of these kinds it serves.

A CRD may be installed later, or never. Every kind is listed and watched where it is served, and asked for again and
again where it is not: more often while a deployment waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Sequence

from headrace_operator import names
from headrace_operator.cluster import Cluster, ClusterError, Gone, Refused, WatchExpired
from headrace_operator.kinds import OPTIONAL_KINDS
from headrace_operator.mirror import Body, Mirror, Place
from headrace_operator.optional import KUEUE, OPTIONAL_APIS
from headrace_operator.workqueue import Key

logger = logging.getLogger(__name__)

# Until a kind that is not served is asked for again: while nobody needs it, and while somebody waits for it.
IDLE_SECONDS = 60.0
WAITING_SECONDS = 3.0
RETRY_SECONDS = 5.0


class Following:
    """What exists of the optional kinds, and why those cannot be used that cannot. `namespaces` None: all of them."""

    def __init__(self, cluster: Cluster, wake: Callable[[Key], None], namespaces: Sequence[str] | None) -> None:
        self._cluster = cluster
        self._wake = wake
        self._places: list[Place] = [(kind, space) for kind in OPTIONAL_KINDS for space in namespaces or (None,)]
        self._places.append((KUEUE, None))
        self._mirror = Mirror(wake)
        # Why a kind cannot be used; empty: it can. What is not in here has not been answered yet.
        self._problems: dict[Place, str] = {}
        self._waiting: dict[str, set[Key]] = {kind: set() for kind in OPTIONAL_APIS}
        self._needed = {kind: asyncio.Event() for kind in OPTIONAL_APIS}

    def children(self, key: Key) -> list[Body]:
        """All objects of optional kinds that are labelled as the deployment's."""
        return self._mirror.children(key)

    def problems(self, key: Key, kinds: Collection[str]) -> dict[str, str] | None:
        """Why a deployment cannot use those of `kinds` that it cannot, by kind. None: not known yet. The key is woken
        when the answer changes; `kinds` stands in for what it asked for before."""
        places = [place for place in self._places if place[0] in kinds and place[1] in (None, key.namespace)]
        found = {kind: self._problems.get((kind, space)) for kind, space in places}
        for kind, waiting in self._waiting.items():
            if found.get(kind, "") == "":
                waiting.discard(key)
            elif key not in waiting:
                waiting.add(key)
                self._needed[kind].set()
        if None in found.values():
            return None
        return {kind: problem for kind, problem in found.items() if problem}

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        for waiting in self._waiting.values():
            waiting.discard(key)

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(*(self._follow(place) for place in self._places))

    async def _follow(self, place: Place) -> None:
        kind = place[0]
        while True:
            pause = 0.0
            try:
                if kind == KUEUE:
                    await self._cluster.find_group(names.KUEUE_GROUP)
                    self._answer(place, "")
                    pause = IDLE_SECONDS  # it may be uninstalled
                else:
                    await self._list_and_watch(place)
            except Gone:
                self._mirror.keep_only(place, ())
                self._answer(place, OPTIONAL_APIS[kind].missing)
                pause = WAITING_SECONDS if self._waiting[kind] else IDLE_SECONDS
            except WatchExpired as error:
                logger.info("%s", error)
            except Refused as error:
                self._answer(place, OPTIONAL_APIS[kind].unusable(str(error)))
                pause = WAITING_SECONDS if self._waiting[kind] else IDLE_SECONDS
            except ClusterError as error:
                # What was seen before still counts: the API server will be back.
                logger.warning("%s", error)
                if place not in self._problems:
                    self._answer(place, OPTIONAL_APIS[kind].unusable(str(error)))
                pause = RETRY_SECONDS
            await self._rest(kind, pause + random.uniform(0.0, 1.0))

    async def _rest(self, kind: str, seconds: float) -> None:
        """Sleep, but no longer than it takes until somebody needs the kind."""
        self._needed[kind].clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._needed[kind].wait(), seconds)

    async def _list_and_watch(self, place: Place) -> None:
        """A list and then what changes, for ever, as far as it goes without an error."""
        version = await self._mirror.list_all(self._cluster, place)
        self._answer(place, "")
        while True:
            version = await self._mirror.watch(self._cluster, place, version)

    def _answer(self, place: Place, problem: str) -> None:
        if self._problems.get(place) == problem:
            return
        if problem:
            logger.info("%s", problem)
        self._problems[place] = problem
        for key in list(self._waiting[place[0]]):
            self._wake(key)
