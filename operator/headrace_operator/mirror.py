"""What exists of some kinds, by deployment, as lists and watches show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.cluster import Cluster
from headrace_operator.kinds import CHILD_SELECTOR
from headrace_operator.watching import changes, pages
from headrace_operator.workqueue import Key

Body = dict[str, Any]
Place = tuple[str, str | None]  # a kind, and the namespace that it is looked for in (None: all)


class Mirror:
    """Objects with our label. `changed` is told each deployment that may look new."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._seen: dict[Place, dict[str, Body]] = {}  # by uid
        self._by_key: dict[Key, dict[str, Body]] = {}  # the same, by deployment

    def children(self, key: Key) -> list[Body]:
        """All objects that are labelled as the deployment's."""
        return list(self._by_key.get(key, {}).values())

    def all_of(self, kind: str) -> list[Body]:
        """Every known object of a kind."""
        return [body for place, seen in self._seen.items() if place[0] == kind for body in seen.values()]

    async def list_all(self, cluster: Cluster, place: Place) -> str:
        """See all that exists at a place and drop what does not; the version to watch from. Raises as `pages` does."""
        kind, namespace = place
        uids, version = set(), ""
        async for bodies, page_version in pages(cluster, kind, namespace, CHILD_SELECTOR):
            version = version or page_version
            for body in bodies:
                uids.add(body["metadata"]["uid"])
                self._see(place, body)
        self.keep_only(place, uids)
        return version

    async def watch(self, cluster: Cluster, place: Place, version: str) -> str:
        """See what changes after `version` until the API server ends the watch; the version to go on from. Raises as
        `changes` does."""
        kind, namespace = place
        async for change, body in changes(cluster, kind, version, namespace, CHILD_SELECTOR):
            version = body["metadata"]["resourceVersion"]
            if change == "DELETED":
                self._drop(place, body["metadata"]["uid"])
            elif change != "BOOKMARK":
                self._see(place, body)
        return version

    def keep_only(self, place: Place, uids: Collection[str]) -> None:
        """Drop all objects of a place but these."""
        for uid in [uid for uid in self._seen.get(place, {}) if uid not in uids]:
            self._drop(place, uid)

    def forget(self, kind: str, uid: str) -> None:
        """Drop an object whose deletion no watch has shown."""
        for place in [place for place in self._seen if place[0] == kind]:
            self._drop(place, uid)

    def _see(self, place: Place, body: Body) -> None:
        """An object exists, like this."""
        metadata = body["metadata"]
        known = self._seen.get(place, {}).get(metadata["uid"])
        if known is not None and known["metadata"]["resourceVersion"] == metadata["resourceVersion"]:
            return
        shown = slim(body, place[0])
        before, now = key_of_child(known) if known else None, key_of_child(shown)
        self._seen.setdefault(place, {})[metadata["uid"]] = shown
        if now:
            self._by_key.setdefault(now, {})[metadata["uid"]] = shown
            self._changed(now)
        if before and before != now:
            self._leave(before, metadata["uid"])

    def _drop(self, place: Place, uid: str) -> None:
        """An object is gone."""
        body = self._seen.get(place, {}).pop(uid, None)
        key = key_of_child(body) if body else None
        if key:
            self._leave(key, uid)

    def _leave(self, key: Key, uid: str) -> None:
        """An object is not the deployment's any more."""
        del self._by_key[key][uid]
        if not self._by_key[key]:
            del self._by_key[key]
        self._changed(key)


def slim(body: Mapping[str, Any], kind: str) -> Body:
    """The object without what nobody reads: of managedFields only other people's changes of a spec are kept."""
    metadata = dict(body["metadata"])
    fields = [
        entry
        for entry in metadata.pop("managedFields", None) or ()
        if entry.get("manager") != names.MANAGER and "f:spec" in (entry.get("fieldsV1") or {})
    ]
    if fields and kind == "Pod":
        metadata["managedFields"] = fields
    return {**body, "kind": kind, "metadata": metadata}


def key_of_child(body: Mapping[str, Any]) -> Key | None:
    """The deployment that a child says it belongs to."""
    metadata = body["metadata"]
    name = (metadata.get("labels") or {}).get(names.LABEL_DEPLOYMENT)
    return Key(metadata["namespace"], name) if name else None
