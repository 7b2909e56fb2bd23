"""The only file that talks to the API server: list and watch of one deployment's EndpointSlices.

The fleet keeps the last known endpoints whenever the API server is away; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from headrace_engine.router.fleet import Fleet
from headrace_engine.router.slices import SERVICE_LABEL, endpoints_of, service_roles

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_SECONDS = 30.0
WATCH_SECONDS = 60  # a watch is renewed this often, so a dead connection is noticed within it
WATCH_GRACE_SECONDS = 15.0
MIN_CYCLE_SECONDS = 0.5
MAX_BACK_OFF_SECONDS = 30.0
MAX_LINE_BYTES = 4 * 1024 * 1024  # more than an object may have

logger = logging.getLogger(__name__)


class NotInCluster(Exception):
    """The environment lacks what a pod with a service account has."""


class Expired(Exception):
    """The API server no longer has the history that the watch asked for (410): list again."""


@dataclass(frozen=True)
class ApiServer:
    """Where the API server is and how to prove who asks. ca_file None: plain HTTP or the system's certificates."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls) -> ApiServer:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        token_file = SERVICE_ACCOUNT / "token"
        if not host or not token_file.exists():
            raise NotInCluster(
                f"--deployment needs a pod with a service account (KUBERNETES_SERVICE_HOST and {token_file}); "
                "outside a cluster use --static"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", token_file, SERVICE_ACCOUNT / "ca.crt")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session with the CA as it is now."""
        context = ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else True
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context), read_bufsize=MAX_LINE_BYTES
        ) as session:
            yield session

    def headers(self) -> dict[str, str]:
        """Read for every request: the kubelet rotates the token in place."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}


class EndpointSliceSource:
    """Keeps a fleet equal to what the API server says about one deployment's role Services."""

    def __init__(self, api: ApiServer, namespace: str, deployment: str, fleet: Fleet) -> None:
        self._api = api
        self._fleet = fleet
        self._roles = service_roles(deployment)
        self._path = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL} in ({','.join(sorted(self._roles))})"
        self._slices: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        """List and watch for ever."""
        num_failures = 0
        while True:
            started_at = time.monotonic()
            try:
                async with self._api.session() as session:
                    version = await self._list(session)
                    num_failures = 0
                    while True:
                        version = await self._watch(session, version)
            except Expired:
                logger.info("the watch of EndpointSlices has expired; listing again")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                num_failures += 1
                logger.warning("API server: %s; keeping the last known groups", error or type(error).__name__)
            except Exception:  # an object that cannot be read: the next list may be sound
                num_failures += 1
                logger.exception("EndpointSlices cannot be read; keeping the last known groups")
            pause = _back_off(num_failures, random.random())
            await asyncio.sleep(max(pause, started_at + MIN_CYCLE_SECONDS - time.monotonic()))

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Take the whole state; returns its resourceVersion."""
        timeout = aiohttp.ClientTimeout(total=LIST_SECONDS)
        parameters = {"labelSelector": self._selector}
        async with session.get(
            self._path, params=parameters, headers=self._api.headers(), timeout=timeout, raise_for_status=True
        ) as response:
            listed = await response.json()
        self._slices = {item["metadata"]["name"]: item for item in listed["items"]}
        self._publish()
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Follow changes until the API server ends the watch; returns the version to go on from. Raises Expired."""
        started_at = time.monotonic()
        parameters = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=WATCH_SECONDS + WATCH_GRACE_SECONDS, sock_connect=LIST_SECONDS)
        async with session.get(self._path, params=parameters, headers=self._api.headers(), timeout=timeout) as response:
            if response.status == 410:
                raise Expired
            response.raise_for_status()
            while line := await response.content.readline():
                version = self._apply(json.loads(line)) or version
        # A proxy that ends watches at once must not make this a busy loop.
        await asyncio.sleep(max(0.0, started_at + MIN_CYCLE_SECONDS - time.monotonic()))
        return version

    def _apply(self, event: dict[str, Any]) -> str | None:
        """One watch event; returns the resourceVersion it brings. Raises Expired."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise Expired
            raise aiohttp.ClientError(f"watch ended with {item.get('code')}: {item.get('message')}")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[item["metadata"]["name"]] = item
            self._publish()
        elif kind == "DELETED":
            self._slices.pop(item["metadata"]["name"], None)
            self._publish()
        version: str | None = item["metadata"].get("resourceVersion")  # a BOOKMARK brings nothing else
        return version

    def _publish(self) -> None:
        self._fleet.replace(endpoints_of(self._slices.values(), self._roles))


def _back_off(num_failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row; jitter in [0, 1) keeps routers from asking in step."""
    ceiling = min(MIN_CYCLE_SECONDS * 2.0 ** min(num_failures, 10), MAX_BACK_OFF_SECONDS)
    return ceiling * (0.5 + 0.5 * jitter)
