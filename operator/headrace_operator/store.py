"""What the watches have shown so far, by deployment: a view over kopf's indices and the mirror of pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kopf
from kopf._core.engines.indexing import OperatorIndexers  # what kopf.operator(indexers=) takes, for embedders

from headrace_operator import names
from headrace_operator.mirror import Body, Mirror, key_of_child
from headrace_operator.workqueue import Key

DEPLOYMENTS_INDEX = "deployments"
CHILDREN_INDEX = "children_{kind}"


class _TellingIndexers(OperatorIndexers):
    """Indices that say which deployment to look at once they have taken a change in.

    An event handler of kopf's beside each index would say it as well, and cost as much again as the index: of a
    thousand new pods each comes with three events."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        super().__init__()
        self._changed = changed

    def replace(self, body: kopf.Body, outcomes: Any) -> None:
        super().replace(body, outcomes)
        for outcome in outcomes.values():
            for key in outcome.result or ():
                self._changed(key)

    def discard(self, body: kopf.Body) -> None:
        super().discard(body)
        metadata = body["metadata"]
        is_deployment = body.get("kind") == names.KIND
        key = Key(metadata.get("namespace") or "", metadata["name"]) if is_deployment else key_of_child(body)
        if key:
            self._changed(key)


class Store:
    """Read access to the indices that `handlers.py` fills and the pods that `pod_watch.py` follows. `changed` is called
    with each key that may look new."""

    def __init__(self, indexed_kinds: tuple[str, ...], changed: Callable[[Key], None] = lambda key: None) -> None:
        self.indexers = _TellingIndexers(changed)
        self.pods = Mirror(changed)
        self._indexed_kinds = indexed_kinds

    def deployment(self, key: Key) -> Body | None:
        """The resource itself, or None if it is gone."""
        return next(self._find(DEPLOYMENTS_INDEX, key), None)

    def children(self, key: Key) -> list[Body]:
        """All objects labelled as the deployment's, whoever owns them."""
        others = [body for kind in self._indexed_kinds for body in self._find(CHILDREN_INDEX.format(kind=kind), key)]
        return [*others, *self.pods.children(key)]

    def deployment_keys(self) -> list[Key]:
        """Every known deployment."""
        return list(self.indexers.indices[DEPLOYMENTS_INDEX])

    def all_of(self, kind: str) -> list[Body]:
        """Every known object of a kind."""
        if kind == "Pod":
            return self.pods.all_of(kind)
        index = DEPLOYMENTS_INDEX if kind == names.KIND else CHILDREN_INDEX.format(kind=kind)
        return [body for values in self.indexers.indices[index].values() for body in values]

    def forget(self, body: Body) -> None:
        """Drop an object whose deletion no watch has shown."""
        if body.get("kind") == "Pod":
            self.pods.forget("Pod", body["metadata"]["uid"])
        else:
            self.indexers.discard(body)  # type: ignore[arg-type]

    def _find(self, index: str, key: Key) -> Iterator[Body]:
        yield from self.indexers.indices[index].get(key, ())
