"""All objects of a kind, everywhere or in a namespace: a list, and then what changes. `cluster.py` does the asking."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace_operator.cluster import Cluster, WatchExpired

Body = dict[str, Any]


async def pages(
    cluster: Cluster, kind: str, namespace: str | None = None, selector: str | None = None
) -> AsyncIterator[tuple[list[Body], str]]:
    """Page by page, so that a large cluster is never in memory as a whole; each with the version to watch from."""
    token = None
    while True:
        page = await cluster.list_page(kind, token, namespace, selector)
        metadata = page.get("metadata") or {}
        yield list(page.get("items") or []), str(metadata.get("resourceVersion") or "")
        token = metadata.get("continue")
        if not token:
            return


async def changes(
    cluster: Cluster, kind: str, version: str, namespace: str | None = None, selector: str | None = None
) -> AsyncIterator[tuple[str, Body]]:
    """What changes after `version`: ADDED, MODIFIED, DELETED or BOOKMARK, and the object. Ends when the API server ends
    it; raises WatchExpired where it must begin anew with a list."""
    async for line in _lines(cluster.open_watch(kind, version, namespace, selector)):
        event = msgspec.json.decode(line)
        if event["type"] == "ERROR":
            raise WatchExpired(f"watch {kind}: {event['object'].get('message')}")
        yield event["type"], event["object"]


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of any length: the HTTP client's own reader refuses those longer than its buffer, and objects can be."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in filter(None, lines):
            yield line
