"""Watching the cluster's room: only while it is needed, through every kind of trouble, and who is woken when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.operator.racks import GPU
from tests.operator.test_census import OURS, SHAPE, node, pod

from headrace_operator import inventory, names
from headrace_operator.admission import Admission, Claim
from headrace_operator.cluster import ClusterError, Refused, WatchExpired
from headrace_operator.groups import GroupKey, Trouble
from headrace_operator.inventory import Inventory
from headrace_operator.scheduling import PodShape
from headrace_operator.workqueue import Key

KEY, OTHER = Key("ns", "demo"), Key("ns", "other")
GROUP = GroupKey("decode", "new", 0)
SHORT = Admission({}, shortage=Trouble(names.REASON_NO_CAPACITY, "decode needs more"))


class Server:
    """Lists what it has, and passes on what tests say on its watches."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {"Node": [node()], "Pod": []}
        self.news: dict[str, asyncio.Queue[Any]] = {"Node": asyncio.Queue(), "Pod": asyncio.Queue()}
        self.refused: set[str] = set()
        self.lists: list[str] = []
        self.watching: set[str] = set()

    async def list_page(self, kind: str, token: str | None, *_: None) -> dict[str, Any]:
        self.lists += [kind] if token is None else []
        if kind in self.refused:
            raise Refused(f"list {kind}: forbidden")
        start = int(token or 0)
        more = {"continue": str(start + 1)} if start + 1 < len(self.objects[kind]) else {}
        return {"metadata": {"resourceVersion": "7", **more}, "items": self.objects[kind][start : start + 1]}

    async def open_watch(self, kind: str, version: str, *_: None) -> AsyncIterator[bytes]:
        self.watching.add(kind)
        try:
            while True:
                said = await self.news[kind].get()
                if isinstance(said, Exception):
                    raise said
                yield json.dumps(said).encode() + b"\n"
        finally:
            self.watching.discard(kind)

    def tell(self, kind: str, change: str, body: dict[str, Any]) -> None:
        body["metadata"]["resourceVersion"] = "8"
        self.news[kind].put_nowait({"type": change, "object": body})


class World:
    """An inventory at work; `woken` counts for whom."""

    def __init__(self) -> None:
        self.server = Server()
        self.woken: list[Key] = []
        self.inventory = Inventory(self.server, self.woken.append, clock=lambda: 0.0)  # type: ignore[arg-type]

    def free(self, key: Key = KEY) -> int | None:
        """Free GPUs of the whole cluster; None: not known."""
        capacity = self.inventory.capacity(key)
        if capacity is None or capacity.problem:
            return None
        return sum(room.free[GPU] for room in capacity.rooms) // 1000

    def unbound(self) -> frozenset[PodShape]:
        capacity = self.inventory.capacity(KEY)
        assert capacity is not None
        return capacity.unbound


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAKE_SECONDS", "RETRY_SECONDS", "REFUSED_RETRY_SECONDS"):
        monkeypatch.setattr(inventory, name, 0.0)
    monkeypatch.setattr(inventory.random, "uniform", lambda *_: 0.0)


@asynccontextmanager
async def at_work() -> AsyncIterator[World]:
    world = World()
    task = asyncio.ensure_future(world.inventory.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], Any]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to hold")


async def test_nothing_is_asked_of_the_cluster_until_a_deployment_needs_it_and_after() -> None:
    async with at_work() as world:
        await asyncio.sleep(0)
        assert world.server.lists == []
        assert world.free() is None
        await until(lambda: world.woken == [KEY] and world.server.watching == {"Node", "Pod"})
        assert world.free() == 4
        world.inventory.forget(KEY)
        await until(lambda: not world.server.watching)
        assert world.free() is None
        await until(lambda: world.free() == 4)
        assert sorted(world.server.lists) == ["Node", "Node", "Pod", "Pod"]


async def test_what_the_watches_tell_is_counted() -> None:
    async with at_work() as world:
        await until(lambda: world.free() == 4)
        world.server.tell("Pod", "ADDED", pod(gpus=3))
        await until(lambda: world.free() == 1)
        world.server.tell("Node", "ADDED", node("n1"))
        await until(lambda: world.free() == 5)
        world.server.tell("Pod", "DELETED", pod(gpus=3))
        world.server.tell("Pod", "BOOKMARK", {"metadata": {}})
        await until(lambda: world.free() == 8)
        world.server.tell("Node", "DELETED", node("n0"))
        await until(lambda: world.free() == 4)


@pytest.mark.parametrize("trouble", [WatchExpired("too old"), ClusterError("connection lost")])
async def test_a_watch_that_ends_begins_again_with_a_list(trouble: Exception) -> None:
    async with at_work() as world:
        world.server.objects["Pod"] = [pod("a"), pod("b")]
        await until(lambda: world.free() == 2)
        world.server.objects["Pod"] = [pod("b")]
        world.server.news["Pod"].put_nowait(trouble)
        await until(lambda: world.free() == 3)


async def test_a_missing_right_is_told_to_those_who_need_it_until_it_is_granted() -> None:
    async with at_work() as world:
        world.server.refused = {"Node"}
        world.inventory.capacity(KEY)
        await until(lambda: KEY in world.woken)
        capacity = world.inventory.capacity(KEY)
        assert capacity is not None
        assert "capacity.clusterWide" in capacity.problem
        assert "list Node: forbidden" in capacity.problem
        world.server.refused = set()
        await until(lambda: world.free() == 4)


async def test_those_who_wait_are_woken_when_room_becomes_free_in_the_order_in_which_they_came() -> None:
    async with at_work() as world:
        world.server.objects["Pod"] = [pod(gpus=4)]
        await until(lambda: world.free(OTHER) == 0 and world.free(KEY) == 0)
        world.inventory.record(OTHER, SHORT)
        world.inventory.record(KEY, SHORT)
        world.woken.clear()
        world.server.tell("Pod", "MODIFIED", pod(gpus=4, deletionTimestamp="now"))
        world.server.tell("Node", "MODIFIED", node())
        world.server.tell("Pod", "ADDED", pod("other", node="n9"))
        await until(lambda: world.server.news["Pod"].empty() and world.server.news["Node"].empty())
        await asyncio.sleep(0)
        assert world.woken == []  # nothing of that makes room
        world.server.tell("Pod", "DELETED", pod(gpus=4))
        await until(lambda: world.woken == [OTHER, KEY])
        world.inventory.record(OTHER, Admission({}))
        world.woken.clear()
        world.server.tell("Node", "ADDED", node("n1"))
        await until(lambda: world.woken == [KEY])


async def test_room_given_to_one_is_not_given_to_the_next_before_the_pods_are_seen() -> None:
    async with at_work() as world:
        await until(lambda: world.free() == 4)
        world.inventory.record(KEY, Admission({}, claims=(Claim(GROUP, ("p0",), SHAPE),)))
        assert world.free(OTHER) == 2
        world.server.tell("Pod", "ADDED", pod("p0", gpus=2, node="", labels=OURS))
        await until(lambda: world.server.news["Pod"].empty())
        assert world.free(OTHER) == 2
        world.inventory.record(KEY, Admission({}, claims=(Claim(GROUP, ("p1",), SHAPE),)))
        assert world.free(OTHER) == 0
        world.inventory.release(KEY)
        assert world.free(OTHER) == 2


async def test_room_that_is_held_is_there_for_the_one_it_is_held_for() -> None:
    async with at_work() as world:
        await until(lambda: world.free() == 4)
        world.inventory.record(KEY, Admission({}, claims=(Claim(GROUP, ("p0",), SHAPE, is_held=True),)))
        assert (world.free(KEY), world.free(OTHER)) == (4, 2)
        assert world.unbound() == frozenset()  # it stands in nobody's way
        world.woken.clear()
        world.server.tell("Pod", "ADDED", pod("other", node="", labels=OURS))
        await until(lambda: world.unbound())
        assert world.woken == []
        world.server.tell("Pod", "MODIFIED", pod("other", labels=OURS))
        await until(lambda: world.woken == [KEY])


async def test_a_deployment_that_is_gone_no_longer_waits_and_its_claims_are_free() -> None:
    async with at_work() as world:
        await until(lambda: world.free() == 4 and world.free(OTHER) == 4)
        world.inventory.record(KEY, Admission({}, claims=(Claim(GROUP, ("p0", "p1"), SHAPE),)))
        world.inventory.record(OTHER, SHORT)
        world.woken.clear()
        world.inventory.forget(KEY)
        await until(lambda: world.woken == [OTHER])
        assert world.free(OTHER) == 4
