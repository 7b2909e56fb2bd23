"""The Kubernetes that a scenario runs on: the one KUBECONFIG names, or the one-machine cluster of `make cluster-up`.

This file is the only one here that runs kubectl and helm. What is looked at often is read without them (reading.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.support import reading

REPOSITORY = Path(__file__).resolve().parents[2]


class SetupError(RuntimeError):
    """Something the user must provide is missing; the message says what and how."""


@dataclass(frozen=True)
class Cluster:
    kubeconfig: Path
    kubectl_path: str
    helm_path: str
    operator_image: str
    engine_image: str
    is_one_machine: bool  # ours: pod and service addresses are reachable from here

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120) -> str:
        """stdout of kubectl; raises RuntimeError with its stderr."""
        return self._run([self.kubectl_path, *arguments], stdin, timeout_seconds)

    def helm(self, *arguments: str, timeout_seconds: float = 300) -> str:
        return self._run([self.helm_path, *arguments], None, timeout_seconds)

    def _run(self, command: list[str], stdin: str | None, timeout_seconds: float) -> str:
        done = subprocess.run(
            command, input=stdin, env=self._environment(), capture_output=True, text=True, timeout=timeout_seconds
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """The object, or None when there is none."""
        if reading.can_read(kind):
            return reading.get(self.kubeconfig, kind, name, namespace)
        text = self.kubectl("get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str = "", namespace: str = "default") -> list[dict[str, Any]]:
        if reading.can_read(kind):
            return reading.list_all(self.kubeconfig, kind, selector, namespace)
        arguments = ["get", kind, "-n", namespace, "-o", "json"]
        if selector:
            arguments += ["-l", selector]
        return json.loads(self.kubectl(*arguments))["items"]

    def apply(self, manifest: str | Mapping[str, Any], namespace: str = "default") -> None:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        self.kubectl("apply", "--server-side", "-n", namespace, "-f", "-", stdin=text)

    def logs(self, pod: str, namespace: str = "default", tail: int = 30) -> str:
        try:
            return self.kubectl("logs", pod, "-n", namespace, f"--tail={tail}")
        except RuntimeError as error:
            return str(error)

    @contextmanager
    def service_url(self, name: str, port: int = 8000, namespace: str = "default") -> Iterator[str]:
        """An address of a Service that answers from here: its cluster IP on our machine, else a port-forward."""
        if self.is_one_machine:
            service = self.get("service", name, namespace)
            if service is None:
                raise RuntimeError(f"service {namespace}/{name} does not exist")
            yield f"http://{service['spec']['clusterIP']}:{port}"
            return
        forward = subprocess.Popen(
            [self.kubectl_path, "port-forward", "-n", namespace, f"service/{name}", f":{port}"],
            env=self._environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()  # "Forwarding from 127.0.0.1:41231 -> 8000"
            if "127.0.0.1:" not in line:
                raise RuntimeError(f"kubectl port-forward to {namespace}/{name} failed: {line or 'no output'}")
            yield "http://127.0.0.1:" + line.split("127.0.0.1:")[1].split(" ")[0]
        finally:
            forward.terminate()
            forward.wait(timeout=10)


def discover() -> Cluster:
    """The cluster that KUBECONFIG names, else our own (brought up if it is down)."""
    return _from_kubeconfig(os.environ["KUBECONFIG"]) if os.environ.get("KUBECONFIG") else _one_machine()


def _tool(name: str) -> str:
    path = os.environ.get(name.upper()) or shutil.which(name)
    if not path:
        raise SetupError(f"{name} is not on PATH: install it, or set {name.upper()} to its path")
    return path


def _from_kubeconfig(kubeconfig: str) -> Cluster:
    images = {}
    for variable in ("HEADRACE_OPERATOR_IMAGE", "HEADRACE_ENGINE_IMAGE"):
        images[variable] = os.environ.get(variable, "")
        if not images[variable]:
            raise SetupError(
                f"KUBECONFIG is set, so {variable} must name an image that this cluster can pull: build "
                "images/*.Containerfile with docker or buildah, push (or `kind load`) them, and set the variable"
            )
    return Cluster(
        Path(kubeconfig).resolve(),
        _tool("kubectl"),
        _tool("helm"),
        images["HEADRACE_OPERATOR_IMAGE"],
        images["HEADRACE_ENGINE_IMAGE"],
        is_one_machine=False,
    )


def _one_machine() -> Cluster:
    """Ours, brought up if it is down, with images of this tree in its registry."""

    def ask(*arguments: str) -> str:
        command = [sys.executable, str(REPOSITORY / "e2e" / "cluster" / "cluster.py"), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress goes on to our stderr
        if done.returncode:
            raise SetupError(f"{' '.join(command)}: exit {done.returncode}; see above")
        return done.stdout.strip()

    images = json.loads(ask("up", "--images"))
    return Cluster(
        Path(ask("kubeconfig")),
        ask("kubectl-path"),
        ask("helm-path"),
        images["operator"],
        images["engine"],
        is_one_machine=True,
    )
