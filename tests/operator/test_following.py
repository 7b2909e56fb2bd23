"""Kinds that a cluster may lack: noticed when they come and go, and their objects followed while they are there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_operator import following, names
from headrace_operator.cluster import ClusterError, Gone, Refused, WatchExpired
from headrace_operator.following import Following
from headrace_operator.optional import KUEUE
from headrace_operator.workqueue import Key

KIND = names.COMPUTE_DOMAIN_KIND
KEY = Key("default", "demo")


def domain(name: str, version: int = 1) -> dict[str, Any]:
    labels = {names.LABEL_DEPLOYMENT: "demo"}
    metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


class FakeServer:
    """Serves the kind, or not; tells of changes that are put into `news`. None ends the watch."""

    def __init__(self) -> None:
        self.failure: ClusterError | None = Gone("list ComputeDomain: 404")
        self.items: list[dict[str, Any]] = []
        self.news: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self.spaces: set[str | None] = set()
        self.groups: set[str] = set()

    async def list_page(self, kind: str, token: str | None, namespace: str | None, selector: str) -> dict[str, Any]:
        if kind != KIND:
            await asyncio.sleep(3600)
        self.spaces.add(namespace)
        if self.failure:
            raise self.failure
        return {"metadata": {"resourceVersion": "5"}, "items": self.items}

    async def find_group(self, group: str) -> None:
        if group not in self.groups:
            raise Gone(f"get APIGroup {group}: 404")

    async def open_watch(self, kind: str, version: str, namespace: str | None, selector: str) -> AsyncIterator[bytes]:
        if self.failure:
            raise self.failure
        while (said := await self.news.get()) is not None:
            yield json.dumps({"type": said[0], "object": said[1]}).encode() + b"\n"


class World:
    """A Following at work."""

    def __init__(self, namespaces: list[str] | None = None) -> None:
        self.server = FakeServer()
        self.woken: asyncio.Queue[Key] = asyncio.Queue()
        self.subject = Following(self.server, self.woken.put_nowait, namespaces)  # type: ignore[arg-type]

    async def next_wake(self) -> None:
        assert await asyncio.wait_for(self.woken.get(), 5) == KEY

    def seen(self) -> set[str]:
        return {body["metadata"]["name"] for body in self.subject.children(KEY)}


@contextlib.asynccontextmanager
async def at_work(world: World) -> AsyncIterator[World]:
    task = asyncio.ensure_future(world.subject.run())
    try:
        yield world
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE_SECONDS", "WAITING_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(following, name, 0.0)
    monkeypatch.setattr(following.random, "uniform", lambda low, high: 0.0)


async def test_until_it_has_asked_it_does_not_know() -> None:
    subject = World().subject
    assert subject.problems(KEY, {KIND}) is None
    assert subject.problems(KEY, ()) == {}


async def test_a_missing_kind_is_named_and_used_once_it_is_there() -> None:
    world = World()
    assert world.subject.problems(KEY, {KIND}) is None
    async with at_work(world):
        await world.next_wake()
        problems = world.subject.problems(KEY, {KIND})
        assert problems is not None
        assert "which this cluster does not serve: install NVIDIA's DRA driver" in problems[KIND]
        world.server.failure = None
        await world.next_wake()
        assert world.subject.problems(KEY, {KIND}) == {}


async def test_kueue_is_looked_for_as_a_group_of_apis_since_nothing_of_it_is_written() -> None:
    world = World()
    world.subject.problems(KEY, {KUEUE})
    async with at_work(world):
        await world.next_wake()
        assert "install Kueue" in (world.subject.problems(KEY, {KUEUE}) or {})[KUEUE]
        world.server.groups.add("kueue.x-k8s.io")
        await world.next_wake()
        assert world.subject.problems(KEY, {KUEUE}) == {}


async def test_a_right_that_is_missing_is_named() -> None:
    world = World()
    world.server.failure = Refused("list ComputeDomain: computedomains is forbidden")
    world.subject.problems(KEY, {KIND})
    async with at_work(world):
        await world.next_wake()
        assert "computedomains is forbidden" in (world.subject.problems(KEY, {KIND}) or {})[KIND]


async def test_objects_are_followed_and_what_a_broken_watch_missed_is_found_by_the_next_list() -> None:
    world = World()
    world.server.failure = None
    world.server.items = [domain("a")]
    async with at_work(world):
        await world.next_wake()
        assert world.seen() == {"a"}
        world.server.news.put_nowait(("ADDED", domain("b")))
        await world.next_wake()
        assert world.seen() == {"a", "b"}
        world.server.news.put_nowait(("DELETED", domain("a", 2)))
        await world.next_wake()
        assert world.seen() == {"b"}
        world.server.items = []
        world.server.failure = WatchExpired("too old")
        world.server.news.put_nowait(None)
        await asyncio.sleep(0)
        world.server.failure = None
        await world.next_wake()
        assert world.seen() == set()


async def test_an_api_server_that_is_away_takes_nothing_away() -> None:
    world = World()
    world.server.failure = None
    world.server.items = [domain("a")]
    async with at_work(world):
        await world.next_wake()
        world.server.failure = ClusterError("no answer")
        world.server.news.put_nowait(None)
        await asyncio.sleep(0.01)
        assert world.seen() == {"a"}
        assert world.subject.problems(KEY, {KIND}) == {}


async def test_an_api_server_that_cannot_say_is_no_reason_to_wait_without_a_word() -> None:
    world = World()
    world.server.failure = ClusterError("list ComputeDomain: conversion webhook failed")
    world.subject.problems(KEY, {KIND})
    async with at_work(world):
        await world.next_wake()
        assert "conversion webhook failed" in (world.subject.problems(KEY, {KIND}) or {})[KIND]
        world.server.failure = None
        await world.next_wake()
        assert world.subject.problems(KEY, {KIND}) == {}


async def test_a_kind_that_goes_away_takes_its_objects_along() -> None:
    world = World()
    world.server.failure = None
    world.server.items = [domain("a")]
    async with at_work(world):
        await world.next_wake()
        world.server.failure = Gone("404")
        world.server.news.put_nowait(None)
        await world.next_wake()
        assert world.seen() == set()


async def test_it_looks_only_into_the_namespaces_that_it_serves() -> None:
    world = World(["default", "other"])
    world.server.failure = None
    world.subject.problems(KEY, {KIND})
    async with at_work(world):
        await world.next_wake()
        assert world.server.spaces == {"default", "other"}
        assert world.subject.problems(KEY, {KIND}) == {}
