"""The only file that talks to the API server (kopf excepted, which watches the resources themselves).

Writes are creations, server-side applies with one field manager, deletes with the object's uid, and events. Objects are
plain dicts: what we send is exactly what `render` made. Resource paths are known, so nothing is discovered at start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.client import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from headrace_operator import metrics, names
from headrace_operator.cluster_errors import (
    ClusterError,
    Exists,
    Gone,
    NamespaceGoing,
    NameTaken,
    Refused,
    WatchExpired,
    error_of,
)
from headrace_operator.kinds import CHILD_SELECTOR, LEASES, RESOURCES

__all__ = ["Cluster", "ClusterError", "Exists", "Gone", "NameTaken", "NamespaceGoing", "Refused", "WatchExpired"]

Body = dict[str, Any]

REQUEST_TIMEOUT_SECONDS = 30
LEASE_TIMEOUT_SECONDS = 5  # a lease that takes longer to renew is as good as lost
MAX_PARALLEL_REQUESTS = 32
PAGE_SIZE = 500  # objects of one page of a long list
# How long the API server keeps a watch open; a watch that is silent for longer is dead.
WATCH_SECONDS = 240
_DEAD_AFTER_SECONDS = WATCH_SECONDS + 60


class Cluster:
    """Reads and writes of the API server. Made by `connection.py`. `namespace`: where people look who name none."""

    def __init__(self, api: client.ApiClient, namespace: str = "default") -> None:
        self._api = api
        self.namespace = namespace
        self._dynamic = DynamicClient(api)  # type: ignore[no-untyped-call]
        self._slots = asyncio.Semaphore(MAX_PARALLEL_REQUESTS)
        # Asked before each write: for how many seconds this process may still write; 0: not now (see election.py).
        self.seconds_to_write: Callable[[], float] = lambda: REQUEST_TIMEOUT_SECONDS
        self.has_returned = asyncio.Event()  # it answers again after it could not be reached; whoever cares clears it
        self._is_away = False

    async def apply(self, body: Body, field_manager: str = names.MANAGER) -> Body:
        """Server-side apply of a child; returns the object as stored. Raises Refused or ClusterError.

        A field that this manager applied before and that `body` leaves out is removed."""
        return await self._call(
            "apply",
            body["kind"],
            "server_side_apply",
            body=body,
            namespace=body["metadata"]["namespace"],
            field_manager=field_manager,
            force_conflicts=True,
        )

    async def create(self, body: Body) -> Body:
        """Create a child; returns it as stored. Never changes one that exists (Exists). Half the API server's work of
        an apply; `field_owners.py` says what must come before one. Raises Refused or ClusterError."""
        return await self._call(
            "create",
            body["kind"],
            "create",
            body=body,
            namespace=body["metadata"]["namespace"],
            field_manager=names.MANAGER,
        )

    async def set_field_owners(self, body: Body, entries: Sequence[Mapping[str, Any]]) -> None:
        """Say anew who owns the fields of an object, as it was read (metadata.managedFields). ClusterError if it is
        gone or someone changed it since."""
        await self._patch_metadata(body, {"managedFields": list(entries)})

    async def replace(self, body: Body) -> Body:
        """Update an object as it was read; ClusterError if someone else changed it since."""
        where = body["metadata"]
        return await self._call(
            "update", body["kind"], "replace", body=body, name=where["name"], namespace=where["namespace"]
        )

    async def set_finalizers(self, body: Body, finalizers: list[str]) -> None:
        """Give an object, as it was read, these finalizers instead of its own, unless it is gone. ClusterError if
        someone else changed it since."""
        with contextlib.suppress(Gone):
            await self._patch_metadata(body, {"finalizers": finalizers})

    async def _patch_metadata(self, body: Body, changes: Body) -> None:
        """Change the metadata of this very object unless it has been changed since it was read."""
        where = body["metadata"]
        metadata = {"uid": where["uid"], "resourceVersion": where["resourceVersion"], **changes}
        await self._call(
            "patch",
            body["kind"],
            "patch",
            body={"metadata": metadata},
            name=where["name"],
            namespace=where["namespace"],
            content_type="application/merge-patch+json",
        )

    async def apply_status(
        self, namespace: str, name: str, uid: str, status: Body, kind: str = names.KIND
    ) -> Body | None:
        """Server-side apply of the status of one of our own resources; None if it (with this uid) is gone."""
        return await self._apply_status(names.API_VERSION, kind, namespace, name, uid, status)

    async def set_gate(self, namespace: str, name: str, uid: str, condition: Body) -> Body | None:
        """Server-side apply of one condition of a pod's status; None if it (with this uid) is gone."""
        return await self._apply_status("v1", "Pod", namespace, name, uid, {"conditions": [condition]})

    async def _apply_status(
        self, api_version: str, kind: str, namespace: str, name: str, uid: str, status: Body
    ) -> Body | None:
        metadata = {"name": name, "namespace": namespace, "uid": uid}
        body = {"apiVersion": api_version, "kind": kind, "metadata": metadata, "status": status}
        try:
            return await self._call(
                "apply_status",
                kind,
                "server_side_apply",
                subresource="status",
                body=body,
                namespace=namespace,
                field_manager=names.MANAGER,
                force_conflicts=True,
            )
        except Gone:
            return None

    async def get(self, kind: str, namespace: str, name: str) -> Body | None:
        try:
            return await self._call("get", kind, "get", name=name, namespace=namespace)
        except Gone:
            return None

    async def get_node(self, name: str) -> Body | None:
        """A node; None if it is gone. Raises Refused where the operator may not read nodes."""
        try:
            return await self._call("get", "Node", "get", name=name)
        except Gone:
            return None

    async def list_children(self, kind: str, namespace: str | None, deployment: str = "") -> list[Body]:
        """All objects of a kind that carry our label (and this deployment's), from the API server's cache."""
        selector = f"{CHILD_SELECTOR},{names.LABEL_DEPLOYMENT}={deployment}" if deployment else CHILD_SELECTOR
        listed = await self._call(
            "list", kind, "get", namespace=namespace, label_selector=selector, resource_version="0"
        )
        return list(listed.get("items") or [])

    async def list_deployments(self, namespace: str | None) -> list[Body]:
        listed = await self._call("list", names.KIND, "get", namespace=namespace)
        return list(listed.get("items") or [])

    async def list_page(
        self, kind: str, token: str | None, namespace: str | None = None, selector: str | None = None
    ) -> Body:
        """A page of all objects of a kind in a namespace, or in the whole cluster; `token`: from the page before."""
        return await self._call(
            "list", kind, "get", namespace=namespace, label_selector=selector, limit=PAGE_SIZE, _continue=token
        )

    async def open_watch(
        self, kind: str, version: str, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[bytes]:
        """Changes of all objects of a kind in a namespace, or in the whole cluster, since `version`, as they are sent:
        pieces of lines of JSON. Ends after `WATCH_SECONDS`. Raises WatchExpired if `version` is too old."""
        metrics.API_CALLS.labels(verb="watch", kind=kind).inc()
        query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(WATCH_SECONDS))]
        timeout = aiohttp.ClientTimeout(total=_DEAD_AFTER_SECONDS, connect=REQUEST_TIMEOUT_SECONDS)
        query += [("labelSelector", selector)] if selector else []
        where = {"namespace": namespace, "resource_version": version, "query_params": query}
        try:
            async with await self._resource(kind).get(serialize=False, _request_timeout=timeout, **where) as response:
                async for piece in response.content.iter_any():
                    yield piece
        except ApiException as error:
            metrics.API_ERRORS.labels(verb="watch", status=error.status).inc()
            raise _translated(error, "watch", kind, {}) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            metrics.API_ERRORS.labels(verb="watch", status="none").inc()
            raise ClusterError(f"watch {kind}: {type(error).__name__}: {error}") from error

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> Body | None:
        """Delete this very object; None if it is gone, or if another one has taken its name."""
        options: Body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            return await self._call("delete", kind, "delete", name=name, namespace=namespace, body=options)
        except Gone:
            return None

    async def create_event(self, event: Body) -> None:
        """Post an event; losing one is not worth failing for, so the caller need not retry."""
        await self._call("create", "Event", "create", body=event, namespace=event["metadata"]["namespace"])

    async def find_group(self, group: str) -> None:
        """Ask for an API group, of whatever version; raises Gone where it is not served. Anyone may ask."""
        await self._call("get", "APIGroup", "request", method="get", path=f"/apis/{group}")

    async def is_served(self, kind: str, namespace: str | None) -> bool:
        """Whether the API server knows this resource of ours yet."""
        try:
            await self._call("list", kind, "get", namespace=namespace, limit=1)
        except Gone:
            return False
        return True

    async def _call(
        self, verb: str, kind: str, function: str, *, subresource: str | None = None, **arguments: Any
    ) -> Body:
        """One request, counted, bounded in time and number, its failure made one of this module's errors."""
        resource: Any = self._dynamic if kind == "APIGroup" else self._resource(kind)
        target = resource.subresources[subresource] if subresource else resource
        metrics.API_CALLS.labels(verb=verb, kind=kind).inc()
        # A renewal waits for no other request: if it came too late, nothing else would matter.
        async with contextlib.nullcontext() if kind == "Lease" else self._slots:
            timeout = self._timeout_seconds(verb, kind)
            try:
                response = await getattr(target, function)(serialize=False, _request_timeout=timeout, **arguments)
                answer = dict(await response.json())
                if self._is_away:
                    self._is_away = False
                    self.has_returned.set()
                return answer
            except ApiException as error:
                metrics.API_ERRORS.labels(verb=verb, status=error.status).inc()
                raise _translated(error, verb, kind, arguments) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                metrics.API_ERRORS.labels(verb=verb, status="none").inc()
                # One that is only slow has lost no watch.
                self._is_away |= not isinstance(error, TimeoutError)
                raise ClusterError(f"{verb} {kind}: {type(error).__name__}: {error}") from error

    def _timeout_seconds(self, verb: str, kind: str) -> float:
        if kind == "Lease":
            return LEASE_TIMEOUT_SECONDS
        if verb in ("get", "list"):
            return REQUEST_TIMEOUT_SECONDS
        left = self.seconds_to_write()
        if left <= 0:
            raise ClusterError(f"{verb} {kind}: not written: the lease is not renewed at present")
        return min(REQUEST_TIMEOUT_SECONDS, left)

    def _resource(self, kind: str) -> Resource:
        group, version, plural = LEASES if kind == "Lease" else RESOURCES.get(kind, ("", "v1", f"{kind.lower()}s"))
        return Resource(  # type: ignore[no-untyped-call]
            prefix="apis" if group else "api",
            group=group,
            api_version=version,
            kind=kind,
            namespaced=kind != "Node",
            name=plural,
            client=self._dynamic,
            subresources={"status": {"name": f"{plural}/status", "kind": kind, "namespaced": True}},
        )


def _translated(error: ApiException, verb: str, kind: str, arguments: Body) -> ClusterError:
    name = arguments.get("name") or (arguments.get("body") or {}).get("metadata", {}).get("name", "")
    return error_of(error.status, error.body, error.reason, verb, f"{kind} {name}".rstrip())
