"""What the watches have shown so far, by deployment: a view over kopf's index and the mirror of children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf
from kopf._core.engines.indexing import OperatorIndexers  # what kopf.operator(indexers=) takes, for embedders

from headrace_operator import names
from headrace_operator.mirror import Body, Mirror
from headrace_operator.workqueue import Key

INDEX = "deployments"


class _TellingIndexers(OperatorIndexers):
    """An index that says which deployment to look at once it has taken a change in: an event handler of kopf's beside
    it would cost as much again."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        super().__init__()
        self._changed = changed

    def replace(self, body: kopf.Body, outcomes: Any) -> None:
        super().replace(body, outcomes)
        self._changed(_key_of(body))

    def discard(self, body: kopf.Body) -> None:
        super().discard(body)
        self._changed(_key_of(body))


class Store:
    """Read access to the index that `handlers.py` fills and to the mirror that `child_watch.py` fills. `changed` is
    called with each key that may look new."""

    def __init__(self, changed: Callable[[Key], None] = lambda key: None) -> None:
        self.indexers = _TellingIndexers(changed)
        self.mirror = Mirror(changed)

    def deployment(self, key: Key) -> Body | None:
        """The resource itself, or None if it is gone."""
        return next(iter(self.indexers.indices[INDEX].get(key, ())), None)

    def children(self, key: Key) -> list[Body]:
        """All objects labelled as the deployment's, whoever owns them."""
        return self.mirror.children(key)

    def deployment_keys(self) -> list[Key]:
        """Every known deployment."""
        return list(self.indexers.indices[INDEX])

    def all_of(self, kind: str) -> list[Body]:
        """Every known object of a kind."""
        if kind != names.KIND:
            return self.mirror.all_of(kind)
        return [body for values in self.indexers.indices[INDEX].values() for body in values]

    def forget(self, body: Body) -> None:
        """Drop an object whose deletion no watch has shown."""
        if body["kind"] == names.KIND:
            self.indexers.discard(body)  # type: ignore[arg-type]
        else:
            self.mirror.forget(body["kind"], body["metadata"]["uid"])


def _key_of(deployment: kopf.Body | Body) -> Key:
    metadata = deployment["metadata"]
    return Key(metadata.get("namespace") or "", metadata["name"])
