"""Following pods through a watch: how many there are, how many are Ready, and when that became so."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable
from types import TracebackType
from typing import Self

from e2e.support.cluster import Cluster

_WATCH_SECONDS = 3600


class Tally:
    """Pods by name, from the lines of a watch (JSON events of the API server)."""

    def __init__(self) -> None:
        self.is_ready: dict[str, bool] = {}
        self.num_ready = 0

    def take(self, line: str) -> None:
        event = json.loads(line)
        kind, pod = event["type"], event["object"]
        name = pod["metadata"].get("name", "")
        if kind == "DELETED":
            self.num_ready -= self.is_ready.pop(name, False)
        elif kind in ("ADDED", "MODIFIED"):
            conditions = pod["status"].get("conditions") or ()
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            self.num_ready += ready - self.is_ready.get(name, False)
            self.is_ready[name] = ready


class PodWatch:
    """A watch as a context manager; waiting returns the time (monotonic seconds) of the event that ended it."""

    def __init__(self, cluster: Cluster, namespace: str, selector: str) -> None:
        query = urllib.parse.urlencode({"watch": "true", "labelSelector": selector, "timeoutSeconds": _WATCH_SECONDS})
        path = f"/api/v1/namespaces/{namespace}/pods?{query}"
        self._command = [cluster.kubectl_path, "get", "--raw", path, "--kubeconfig", str(cluster.kubeconfig)]
        self._tally = Tally()
        self._changed = threading.Condition()
        self._time = time.monotonic()
        self._has_ended = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        self._thread.join(timeout=10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._tally.take(line)
                self._time = time.monotonic()
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_count(self, count: int, limit_seconds: float) -> float:
        """Until exactly `count` pods exist."""
        return self._wait(lambda: len(self._tally.is_ready) == count, f"{count} pods", limit_seconds)

    def wait_ready(self, count: int, limit_seconds: float) -> float:
        """Until `count` pods are Ready."""
        return self._wait(lambda: self._tally.num_ready >= count, f"{count} ready pods", limit_seconds)

    def _wait(self, holds: Callable[[], bool], what: str, limit_seconds: float) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: holds() or self._has_ended, limit_seconds) or not holds():
                tally = f"{len(self._tally.is_ready)} pods, {self._tally.num_ready} ready"
                raise TimeoutError(f"{what}: not within {limit_seconds:.0f} s, or the watch ended; there are {tally}")
            return self._time
