"""As much of an API server as a list and watch of EndpointSlices needs, with faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web


def endpoint_slice(
    name: str,
    service: str,
    endpoints: list[dict[str, Any]] | None,
    ports: list[dict[str, Any]] | None = ({"name": "http", "port": 8000},),  # type: ignore[assignment]
    family: str = "IPv4",
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": list(ports) if ports is not None else None,
        "endpoints": endpoints,
    }


def ready_pod(address: str, name: str, ready: bool = True) -> dict[str, Any]:
    """An entry of a Service that publishes what is not ready: all of them are called `ready`."""
    conditions = {"ready": True, "serving": ready, "terminating": False}
    return {"addresses": [address], "conditions": conditions, "targetRef": {"name": name}}


class FakeApiServer:
    """Keeps slices and a history of events; `compact` forgets the history, so that older watches get 410."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.version = 1
        self.oldest = 0
        self.num_lists = 0
        self.watched_from: list[int] = []
        self.tokens: list[str] = []
        self.selectors: set[str] = set()
        self.num_failures = 0  # so many requests are answered with 500
        self.open_watches = 0
        self._changed = asyncio.Condition()
        self._watch_generation = 0
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.slices[name] = item
        await self._emit({"type": kind, "object": item})

    async def delete(self, name: str) -> None:
        self.version += 1
        item = self.slices.pop(name)
        item["metadata"]["resourceVersion"] = str(self.version)
        await self._emit({"type": "DELETED", "object": item})

    async def bookmark(self) -> None:
        """Time passes elsewhere: the version rises without an event for these objects."""
        self.version += 10
        await self._emit({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})

    async def error(self, code: int) -> None:
        self.oldest = self.version if code == 410 else self.oldest
        status = {"kind": "Status", "code": code, "message": "fault", "metadata": {}}
        await self._emit({"type": "ERROR", "object": status})
        self.events.pop()

    async def compact(self) -> None:
        """Forget all history and end all watches."""
        self.version += 10
        self.oldest = self.version
        await self.end_watches()

    async def end_watches(self) -> None:
        async with self._changed:
            self._watch_generation += 1
            self._changed.notify_all()

    async def _emit(self, event: dict[str, Any]) -> None:
        async with self._changed:
            self.events.append((self.version, event))
            self._changed.notify_all()
        await asyncio.sleep(0.02)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        self.selectors.add(request.query["labelSelector"])
        if self.num_failures:
            self.num_failures -= 1
            return web.Response(status=500)
        if request.query.get("watch") == "true":
            return await self._watch(request)
        self.num_lists += 1
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        self.watched_from.append(since)
        if since < self.oldest:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        stream = web.StreamResponse()
        await stream.prepare(request)
        generation, num_sent = self._watch_generation, 0
        self.open_watches += 1
        try:
            while generation == self._watch_generation:
                for version, event in list(self.events)[num_sent:]:
                    num_sent += 1
                    if version > since or event["type"] == "ERROR":
                        await stream.write(json.dumps(event).encode() + b"\n")
                async with self._changed:
                    if len(self.events) == num_sent and generation == self._watch_generation:
                        await self._changed.wait()
        finally:
            self.open_watches -= 1
        return stream
