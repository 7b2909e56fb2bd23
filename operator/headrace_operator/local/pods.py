"""Local stand-ins for pods: the rendered pod's command, run as a process, observed as the planner wants it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_operator import names
from headrace_operator.groups import GroupKey, Pod, Trouble
from headrace_operator.local.ports import HOST, PodPorts
from headrace_operator.local.process import LocalProcess, find_program

_FIELDS = {"status.podIP": HOST, "status.hostIP": HOST, "spec.nodeName": "localhost"}


class NotLocal(ValueError):
    """Something of the pod cannot be had without a cluster."""


def local_environment(body: Mapping[str, Any]) -> dict[str, str]:
    """The engine container's environment with what a kubelet would fill in. Raises NotLocal."""
    metadata = body["metadata"]
    fields = {**_FIELDS, "metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"]}
    result = {}
    for variable in engine_container(body)["env"]:
        if "valueFrom" not in variable:
            result[variable["name"]] = str(variable.get("value", ""))
            continue
        path = (variable["valueFrom"].get("fieldRef") or {}).get("fieldPath")
        if path not in fields:
            raise NotLocal(f"env {variable['name']}: its valueFrom needs a cluster; give a value to run locally")
        result[variable["name"]] = fields[path]
    return result


def engine_container(body: Mapping[str, Any]) -> dict[str, Any]:
    """The rendered engine container of a pod."""
    containers = body["spec"]["containers"]
    return next(dict(container) for container in containers if container["name"] == names.CONTAINER_ENGINE)


@dataclass
class LocalPod:
    """A pod's process and what is known of it."""

    key: GroupKey
    index: int
    name: str
    ports: PodPorts
    process: LocalProcess
    started_at: float
    is_ready: bool = False
    deadline: float | None = None  # epoch seconds after which it is killed

    @classmethod
    async def start(
        cls, key: GroupKey, index: int, body: Mapping[str, Any], ports: PodPorts, log_dir: Path, bin_dir: Path | None
    ) -> LocalPod:
        """Run a rendered pod."""
        container = engine_container(body)
        program, *arguments = [str(word) for word in [*container["command"], *container["args"]]]
        name = body["metadata"]["name"]
        process = await LocalProcess.start(
            [find_program(program, bin_dir), *arguments], local_environment(body), log_dir / f"{name}.log"
        )
        return cls(key, index, name, ports, process, started_at=time.time())

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports.http}"

    @property
    def uid(self) -> str:
        return str(self.process.pid)

    def observed(self) -> Pod:
        """The process as the planner sees a pod."""
        code = self.process.exit_code
        phase = "Running" if code is None else ("Succeeded" if code == 0 else "Failed")
        trouble = None
        if code is not None:
            text = f"{self.name} exited with code {code}\n{self.process.tail()}"
            trouble = Trouble(names.REASON_CRASH_LOOP, text)
        return Pod(
            name=self.name,
            uid=self.uid,
            index=self.index,
            phase=phase,
            is_ready=self.is_ready and code is None,
            deadline=self.deadline,
            trouble=trouble,
        )

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end; `kill_if_late` makes sure."""
        self.is_ready = False
        self.deadline = time.time() + grace_seconds
        self.process.signal(signal.SIGTERM if grace_seconds > 0 else signal.SIGKILL)

    def kill_if_late(self, now: float) -> None:
        if self.deadline is not None and now >= self.deadline:
            self.process.signal(signal.SIGKILL)
