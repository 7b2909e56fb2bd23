"""kopf, used level-triggered: an index of the resources, which says which of them to look at (`store.py`).

All handlers are coroutines: kopf would run plain functions in threads. Nothing else of kopf is used: its handlers for
creation, update, deletion, timers and daemons would write finalizers and annotations into the resources and keep state
there; see `reconcile.py` for what happens instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kopf

from headrace_operator import names
from headrace_operator.mirror import slim
from headrace_operator.retries import watch_pauses
from headrace_operator.store import INDEX
from headrace_operator.workqueue import Key


def build_registry(indexed: Callable[[], None]) -> kopf.OperatorRegistry:
    """All handlers: the index, the log-in, and who is told once the index shows all that exists."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.index(names.GROUP, names.VERSION, names.PLURAL, id=INDEX, registry=registry)
    async def index_deployment(body: kopf.Body, namespace: str | None, name: str, **_: Any) -> dict[Key, Any]:
        return {Key(namespace or "", name): slim(body, names.KIND)}

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def deployment_changed(**_: Any) -> None:
        # kopf calls this once all that it has listed is in the index; without any deployment there is nothing to do.
        indexed()

    return registry


class _NoDiffs(kopf.DiffBaseStorage):
    """Nobody asks what has changed in an object: kopf need not copy and compare each that a watch shows, which would
    be half of what an event costs, nor read or write what it was before."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _Backoffs:
    """Waits before a watch is tried again, again and again: kopf would end the process after a minute."""

    def __iter__(self) -> Iterator[float]:
        return watch_pauses()


def settings() -> kopf.OperatorSettings:
    """Timeouts that notice a dead watch, and nothing posted or stored by kopf itself."""
    result = kopf.OperatorSettings()
    result.peering.standalone = True
    result.posting.enabled = False
    result.persistence.diffbase_storage = _NoDiffs()
    result.scanning.disabled = True  # needs no rights on namespaces and CRDs; serve.py waits for the CRD
    result.watching.server_timeout = 300
    result.watching.client_timeout = 310
    result.watching.connect_timeout = 30
    result.watching.chunk_size = 500
    result.networking.request_timeout = 30
    result.networking.error_backoffs = _Backoffs()
    return result
