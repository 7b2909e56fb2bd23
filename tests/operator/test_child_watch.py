"""The children of all deployments, followed: what the store has of them, who is told, and what a lost watch costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headrace_operator import child_watch, names
from headrace_operator.child_watch import ChildWatch
from headrace_operator.cluster import ClusterError, WatchExpired
from headrace_operator.kinds import CHILD_KINDS
from headrace_operator.mirror import Mirror
from headrace_operator.workqueue import Key

Body = dict[str, Any]
DEMO, OTHER = Key("default", "demo"), Key("default", "other")


def pod(name: str, version: int = 1, deployment: str | None = "demo") -> Body:
    labels = {names.LABEL_DEPLOYMENT: deployment} if deployment else {}
    metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


class Server:
    """Lists the pods that it has in pages of two and tells what is put into `news`; an error there ends the watch, None
    too. Of the other kinds there is nothing, but for a Service if it is given one."""

    def __init__(self, *pods: Body) -> None:
        self.pods = list(pods)
        self.news: asyncio.Queue[tuple[str, Body] | ClusterError | None] = asyncio.Queue()
        self.num_lists = 0
        self.watched_from: list[str] = []
        self.spaces: set[tuple[str, str | None]] = set()
        self.service: Body | None = None

    async def list_page(self, kind: str, token: str | None, namespace: str | None, selector: str) -> Body:
        assert selector == f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
        self.spaces.add((kind, namespace))
        if kind != "Pod":
            items = [self.service] if kind == "Service" and self.service else []
            return {"metadata": {"resourceVersion": "5"}, "items": items}
        self.num_lists += token is None
        start = int(token or 0)
        more = {"continue": str(start + 2)} if start + 2 < len(self.pods) else {}
        return {"metadata": {"resourceVersion": "5", **more}, "items": self.pods[start : start + 2]}

    async def open_watch(self, kind: str, version: str, namespace: str | None, selector: str) -> AsyncIterator[bytes]:
        if kind != "Pod":
            await asyncio.sleep(3600)
        self.watched_from.append(version)
        while (said := await self.news.get()) is not None:
            if isinstance(said, ClusterError):
                raise said
            yield json.dumps({"type": said[0], "object": said[1]}).encode() + b"\n"


class World:
    """A watch at work on a server."""

    def __init__(self, server: Server, namespaces: list[str] | None = None) -> None:
        self.server = server
        self.told: list[Key] = []
        self.mirror = Mirror(self.told.append)
        self.subject = ChildWatch(server, self.mirror, namespaces)  # type: ignore[arg-type]

    async def say(self, *news: tuple[str, Body] | ClusterError | None) -> None:
        """Have the server tell, and wait until it was heard."""
        for said in news:
            self.server.news.put_nowait(said)
        for _ in range(50):
            await asyncio.sleep(0)

    def seen(self, key: Key = DEMO) -> dict[str, int]:
        return {
            body["metadata"]["name"]: int(body["metadata"]["resourceVersion"]) for body in self.mirror.children(key)
        }


@contextlib.asynccontextmanager
async def at_work(
    *pods: Body, namespaces: list[str] | None = None, server: Server | None = None
) -> AsyncIterator[World]:
    world = World(server or Server(*pods), namespaces)
    task = asyncio.ensure_future(world.subject.run())
    try:
        await asyncio.wait_for(world.subject.is_listed.wait(), 5)
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Pauses take no time and are counted."""
    taken: list[None] = []

    def count() -> Iterator[float]:
        while True:
            taken.append(None)
            yield 0.0

    monkeypatch.setattr(child_watch, "watch_pauses", count)
    return taken


async def test_what_is_listed_and_what_changes_is_told_to_its_deployment_which_then_has_it() -> None:
    async with at_work(pod("a"), pod("b"), pod("c", deployment="other")) as world:
        assert (world.seen(), world.seen(OTHER)) == ({"a": 1, "b": 1}, {"c": 1})
        assert world.told == [DEMO, DEMO, OTHER]
        await world.say(("MODIFIED", pod("a", 6)), ("ADDED", pod("d", 7)), ("DELETED", pod("b", 8)))
        assert world.seen() == {"a": 6, "d": 7}
        assert world.told[3:] == [DEMO, DEMO, DEMO]
        assert {body["kind"] for body in world.mirror.all_of("Pod")} == {"Pod"}


async def test_children_of_every_kind_are_followed() -> None:
    server = Server(pod("a"))
    server.service = pod("s")
    async with at_work(server=server) as world:
        assert {body["kind"] for body in world.mirror.children(DEMO)} == {"Pod", "Service"}


async def test_pods_of_no_deployment_are_known_and_told_to_nobody() -> None:
    async with at_work(pod("a", deployment=None)) as world:
        await world.say(("MODIFIED", pod("a", 6, deployment=None)), ("DELETED", pod("a", 7, deployment=None)))
        assert world.told == []


async def test_a_pod_that_changes_its_deployment_is_told_to_both() -> None:
    async with at_work(pod("a")) as world:
        await world.say(("MODIFIED", pod("a", 6, deployment="other")))
        assert (world.seen(), world.seen(OTHER)) == ({}, {"a": 6})
        assert set(world.told[1:]) == {DEMO, OTHER}


async def test_a_watch_that_ends_is_taken_up_where_it_was_without_a_list() -> None:
    async with at_work(pod("a")) as world:
        await world.say(("MODIFIED", pod("a", 6)), ("BOOKMARK", pod("", 9)), None)
        assert (world.server.num_lists, world.server.watched_from) == (1, ["5", "9"])


@pytest.mark.parametrize(
    ("failure", "num_pauses"),
    [(WatchExpired("watch Pod: too old"), 0), (ClusterError("watch Pod: connection lost"), 1)],
    ids=["expired", "broken"],
)
async def test_after_a_lost_watch_a_list_finds_what_it_missed_and_tells_only_that(
    failure: ClusterError, num_pauses: int, pauses: list[None]
) -> None:
    async with at_work(pod("a"), pod("b"), pod("c")) as world:
        world.told.clear()
        world.server.pods = [pod("b"), pod("c", 7), pod("d", 8)]
        await world.say(failure)
        assert world.seen() == {"b": 1, "c": 7, "d": 8}
        assert world.told == [DEMO, DEMO, DEMO]  # c, d and a, which is gone
        assert len(pauses) == num_pauses


async def test_an_api_server_that_is_away_takes_nothing_away() -> None:
    async with at_work(pod("a")) as world:
        world.server.list_page = _refuse  # type: ignore[method-assign]
        await world.say(ClusterError("no answer"))
        assert world.seen() == {"a": 1}


async def _refuse(*_: Any) -> Body:
    raise ClusterError("no answer")


async def test_one_that_went_away_unseen_can_be_forgotten() -> None:
    async with at_work(pod("a"), pod("b")) as world:
        world.mirror.forget("Pod", "a")
        assert world.seen() == {"b": 1}
        assert world.told[-1] == DEMO


async def test_it_looks_only_into_the_namespaces_that_it_serves_and_waits_for_all_of_them() -> None:
    async with at_work(namespaces=["default", "other"]) as world:
        assert world.server.spaces == {(kind, space) for kind in CHILD_KINDS for space in ("default", "other")}
