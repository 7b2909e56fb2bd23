"""The store as kopf fills it: who is told of a change, when, and what is there by then."""

from __future__ import annotations

import asyncio
from typing import Any

from kopf._cogs.structs.ephemera import Memo
from kopf._cogs.structs.references import Resource
from kopf._core.actions import lifecycles
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event
from tests.operator.worlds import stored

from headrace_operator import names
from headrace_operator.handlers import build_registry, settings
from headrace_operator.kinds import RESOURCES
from headrace_operator.store import Store
from headrace_operator.workqueue import Key

DEMO = Key("default", "demo")


class Watched:
    """A store behind kopf, fed with events by hand; each key that it tells, and whether it had it by then."""

    def __init__(self) -> None:
        self.are_indexed = asyncio.Event()
        self.store = Store(self._changed)
        self.told: list[tuple[Key, bool]] = []
        self._registry = build_registry(self.are_indexed.set)
        self.store.indexers.ensure(self._registry._indexing.get_all_handlers())
        self._memories = ResourceMemories()

    def _changed(self, key: Key) -> None:
        self.told.append((key, self.store.deployment(key) is not None))

    async def show(self, change: str, body: dict[str, Any]) -> None:
        group, version, plural = RESOURCES[body["kind"]]
        await process_resource_event(
            lifecycle=lifecycles.all_at_once,
            indexers=self.store.indexers,
            registry=self._registry,
            settings=settings(),
            memories=self._memories,
            memobase=Memo(),
            resource=Resource(group=group, version=version, plural=plural, kind=body["kind"], namespaced=True),
            raw_event={"type": change, "object": body},  # type: ignore[typeddict-item]
            event_queue=asyncio.Queue(),
        )


def a_deployment() -> dict[str, Any]:
    return stored().model_dump(mode="json", by_alias=True) | {"kind": names.KIND}


async def test_a_change_is_told_once_the_store_has_it() -> None:
    watched = Watched()
    for change, is_known in (("ADDED", True), ("MODIFIED", True), ("DELETED", False)):
        await watched.show(change, a_deployment())
        assert watched.told.pop() == (DEMO, is_known)
    assert watched.told == []


async def test_one_that_went_away_unseen_can_be_forgotten() -> None:
    watched = Watched()
    await watched.show("ADDED", a_deployment())
    (shown,) = watched.store.all_of(names.KIND)
    watched.store.forget(shown)
    assert (watched.store.all_of(names.KIND), watched.told[-1]) == ([], (DEMO, False))


async def test_the_first_deployment_that_kopf_hands_on_says_that_the_index_is_full() -> None:
    watched = Watched()
    assert not watched.are_indexed.is_set()
    await watched.show("ADDED", a_deployment())
    assert watched.are_indexed.is_set()
