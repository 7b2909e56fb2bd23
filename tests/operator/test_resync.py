"""Comparing the store with the API server: what is dropped, and when the watches count as dead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kopf._core.engines.indexing import OperatorIndexer

from headrace_operator import names, resync
from headrace_operator.resync import Resync
from headrace_operator.store import INDEX, Store
from headrace_operator.workqueue import WorkQueue


def body(name: str, version: int = 1) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"kind": "Pod", "metadata": {**metadata, "labels": {names.LABEL_DEPLOYMENT: "demo"}}}


class Server:
    """What the API server has: pods only."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.has_returned = asyncio.Event()
        self.pods = {pod["metadata"]["name"]: pod for pod in pods}

    async def list_children(self, kind: str, namespace: str | None) -> list[dict[str, Any]]:
        return list(self.pods.values()) if kind == "Pod" else []

    async def list_page(self, kind: str, token: str | None, namespace: str | None, selector: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": list(self.pods.values())}

    async def list_deployments(self, namespace: str | None) -> list[dict[str, Any]]:
        return []

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.pods.get(name)


async def store_with(*pods: dict[str, Any]) -> Store:
    store = Store()
    store.indexers[INDEX] = OperatorIndexer()  # type: ignore[index]
    await store.mirror.list_all(Server(*pods), ("Pod", None))  # type: ignore[arg-type]
    return store


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_SECONDS", 0.0)


def subject(server: Server, store: Store) -> Resync:
    return Resync(server, store, WorkQueue(), None)  # type: ignore[arg-type]


async def test_an_object_that_went_away_unseen_is_dropped() -> None:
    store = await store_with(body("kept"), body("gone"))
    comparison = subject(Server(body("kept")), store)
    await comparison.compare()
    assert [pod["metadata"]["name"] for pod in store.all_of("Pod")] == ["kept"]
    assert comparison.is_live


async def test_an_object_newer_than_the_list_is_kept() -> None:
    server, store = Server(), await store_with(body("new"))
    server.list_children = _empty  # type: ignore[method-assign]
    server.pods["new"] = body("new")
    await subject(server, store).compare()
    assert len(store.all_of("Pod")) == 1


async def _empty(kind: str, namespace: str | None) -> list[dict[str, Any]]:
    return []


@pytest.mark.parametrize("shown", [(), (body("p", version=1),)], ids=["never shown", "shown as it was before"])
async def test_watches_are_dead_when_they_miss_a_change_twice(shown: tuple[dict[str, Any], ...]) -> None:
    comparison = subject(Server(body("p", version=2)), await store_with(*shown))
    await comparison.compare()
    assert comparison.is_live
    await comparison.compare()
    assert not comparison.is_live


async def test_one_slow_round_is_forgiven() -> None:
    server, store = Server(body("p", version=2)), await store_with(body("p", version=1))
    comparison = subject(server, store)
    await comparison.compare()
    server.pods["p"] = body("p", version=1)
    await comparison.compare()
    server.pods["p"] = body("p", version=2)
    await comparison.compare()
    assert comparison.is_live


async def test_soon_after_an_outage_what_went_meanwhile_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "RELIST_SECONDS", 0.0)
    server, store = Server(), await store_with(body("gone"))
    forget, was_told = store.forget, asyncio.Event()

    def forget_and_tell(shown: dict[str, Any]) -> None:
        forget(shown)
        was_told.set()

    store.forget = forget_and_tell  # type: ignore[method-assign]
    running = asyncio.create_task(subject(server, store).run())
    server.has_returned.set()
    await asyncio.wait_for(was_told.wait(), 5)
    assert store.all_of("Pod") == []
    assert not server.has_returned.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
