"""Following pods through a watch: how many there are, how many are Ready, and when that became so."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from e2e.support.cluster import Cluster


class Tally:
    """Pods by name, from a list and the events of the watch that follows it."""

    def __init__(self) -> None:
        self.is_ready: dict[str, bool] = {}
        self.num_ready = 0

    def restart(self, pods: list[Mapping[str, Any]]) -> None:
        """These are all the pods there are."""
        self.is_ready = {pod["metadata"]["name"]: _is_ready(pod) for pod in pods}
        self.num_ready = sum(self.is_ready.values())

    def take(self, event: Mapping[str, Any]) -> None:
        """An event of the API server."""
        kind, pod = event["type"], event["object"]
        name = pod["metadata"].get("name", "")
        if kind == "DELETED":
            self.num_ready -= self.is_ready.pop(name, False)
        elif kind in ("ADDED", "MODIFIED"):
            ready = _is_ready(pod)
            self.num_ready += ready - self.is_ready.get(name, False)
            self.is_ready[name] = ready


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


class PodWatch:
    """A watch as a context manager; waiting returns the time (monotonic seconds) of the event that ended it.

    A busy API server ends watches that fall behind; then the pods are listed and watched again.
    """

    def __init__(self, cluster: Cluster, namespace: str, selector: str) -> None:
        self._cluster = cluster
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = selector
        self._tally = Tally()
        self._changed = threading.Condition()
        self._time = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            process = self._process
        if process:
            process.terminate()
        self._thread.join(timeout=30)

    def _url(self, **query: str) -> str:
        return f"{self._path}?{urllib.parse.urlencode({'labelSelector': self._selector, **query})}"

    def _follow(self) -> None:
        while not self._is_over:
            path = self._url(watch="true", resourceVersion=self._list(), timeoutSeconds="3600")
            command = [self._cluster.kubectl_path, "get", "--raw", path, "--kubeconfig", str(self._cluster.kubeconfig)]
            with self._changed:
                if self._is_over:
                    return
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if not self._take(line):
                        break
                process.terminate()

    def _list(self) -> str:
        """Count what there is; the version to watch from."""
        listed = json.loads(self._cluster.kubectl("get", "--raw", self._url()))
        self._change(lambda: self._tally.restart(listed["items"]))
        return str(listed["metadata"]["resourceVersion"])

    def _take(self, line: str) -> bool:
        """Whether the watch goes on; not after the error that says that it fell too far behind."""
        event = json.loads(line)
        if event["type"] == "ERROR":
            return False
        self._change(lambda: self._tally.take(event))
        return True

    def _change(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._time = time.monotonic()
            self._changed.notify_all()

    def wait_count(self, count: int, limit_seconds: float) -> float:
        """Until exactly `count` pods exist."""
        return self._wait(lambda: len(self._tally.is_ready) == count, f"{count} pods", limit_seconds)

    def wait_ready(self, count: int, limit_seconds: float) -> float:
        """Until `count` pods are Ready."""
        return self._wait(lambda: self._tally.num_ready >= count, f"{count} ready pods", limit_seconds)

    def _wait(self, holds: Callable[[], bool], what: str, limit_seconds: float) -> float:
        with self._changed:
            if not self._changed.wait_for(holds, limit_seconds):
                tally = f"{len(self._tally.is_ready)} pods, {self._tally.num_ready} ready"
                raise TimeoutError(f"{what}: not within {limit_seconds:.0f} s; there are {tally}")
            return self._time
