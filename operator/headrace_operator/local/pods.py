"""Local stand-ins for pods: the rendered pod's command, run as a process, observed as the planner wants it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Mapping
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
    return environment_of(engine_container(body)["env"], body["metadata"])


def environment_of(variables: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, str]:
    """A container's `env`, in a pod with this metadata, as plain text. Raises NotLocal."""
    fields = {**_FIELDS, "metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"]}
    result: dict[str, str] = {}
    for variable in variables:
        if "valueFrom" not in variable:
            result[variable["name"]] = expanded(str(variable.get("value", "")), result)
            continue
        path = (variable["valueFrom"].get("fieldRef") or {}).get("fieldPath")
        if path not in fields:
            raise NotLocal(f"env {variable['name']}: its valueFrom needs a cluster; give a value to run locally")
        result[variable["name"]] = fields[path]
    return result


def local_command(body: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """The engine container's program and arguments."""
    container = engine_container(body)
    return [expanded(str(word), environment) for word in [*container["command"], *container["args"]]]


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """`text` with $(NAME) replaced as a kubelet does: $$ stands for $, and an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def not_run_here(body: Mapping[str, Any]) -> list[str]:
    """Names of a pod's containers besides the engine: there is no image to run them from."""
    others = [*body["spec"].get("initContainers", []), *body["spec"]["containers"]]
    return [container["name"] for container in others if container["name"] != names.CONTAINER_ENGINE]


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
    ready_since: float | None = None  # epoch seconds
    deadline: float | None = None  # epoch seconds after which it is killed

    @classmethod
    async def start(
        cls, key: GroupKey, index: int, body: Mapping[str, Any], ports: PodPorts, log_dir: Path, bin_dir: Path | None
    ) -> LocalPod:
        """Run a rendered pod."""
        environment = local_environment(body)
        program, *arguments = local_command(body, environment)
        name = body["metadata"]["name"]
        process = await LocalProcess.start(
            [find_program(program, bin_dir), *arguments], environment, log_dir / f"{name}.log"
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
            ready_since=self.ready_since if self.is_ready and code is None else None,
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
