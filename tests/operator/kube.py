"""kubectl for tests, and an operator process that serves one namespace of a real cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_operator import names

KUBECTL = os.environ.get("KUBECTL", "kubectl")
IMAGE_VARIABLE = "HEADRACE_OPERATOR_IMAGE"

# Stands in for the engine where only the operator is tested: answers its probes, and ends when told to.
STAND_IN = """
import http.server, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == '/die':
            print('asked to die', flush=True)
            os._exit(3)
    def log_message(self, *_): pass
http.server.HTTPServer(('0.0.0.0', 8000), Handler).serve_forever()
"""
OVERLAY = {"podSpec": {"containers": [{"name": "engine", "command": ["python3", "-c"], "args": [STAND_IN]}]}}


def run(*arguments: str, body: Any = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One kubectl command; `body` goes to its standard input as JSON."""
    text = json.dumps(body) if body is not None else None
    done = subprocess.run([KUBECTL, *arguments], input=text, capture_output=True, text=True, timeout=90)
    if check and done.returncode:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done


def required_image() -> str:
    """An image with Python in it: the operator's."""
    image = os.environ.get(IMAGE_VARIABLE)
    if not os.environ.get("KUBECONFIG") or not image:
        pytest.fail(f"end-to-end tests need KUBECONFIG and {IMAGE_VARIABLE}; see `make help`")
    return image


class Namespace:
    """kubectl within one namespace."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *arguments: str, body: Any = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run("-n", self.name, *arguments, body=body, check=check)

    def apply(self, body: dict[str, Any]) -> None:
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", body=body)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        done = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(done.stdout)) if done.stdout.strip() else None

    def list(self, kind: str, deployment: str) -> list[dict[str, Any]]:
        selector = f"{names.LABEL_DEPLOYMENT}={deployment}"
        return list(json.loads(self.run("get", kind, "-l", selector, "-o", "json").stdout)["items"])

    def pod_uids(self, deployment: str, role: str = "") -> dict[str, str]:
        """uid by name of the engine pods that are not being deleted."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.list("pods", deployment)
            if pod["metadata"]["labels"].get(names.LABEL_ROLE, "").startswith(role)
            and names.LABEL_POD_INDEX in pod["metadata"]["labels"]
            and "deletionTimestamp" not in pod["metadata"]
        }

    def condition(self, deployment: str, kind: str) -> dict[str, Any]:
        body = self.get("dd", deployment) or {}
        conditions = (body.get("status") or {}).get("conditions") or []
        current = [
            c for c in conditions if c["type"] == kind and c["observedGeneration"] == body["metadata"]["generation"]
        ]
        return dict(current[0]) if current else {}

    def wait_ready(self, deployment: str, seconds: float = 180) -> None:
        eventually(lambda: self.condition(deployment, names.READY).get("status") == "True", seconds)


def eventually(check: Callable[[], Any], seconds: float = 60) -> Any:
    """Poll until `check` is true; its value. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)


class Operator:
    """`headrace-operator` as a process here, with the rights of KUBECONFIG."""

    def __init__(self, namespace: str, image: str, log: Path) -> None:
        self._command = [
            sys.executable,
            "-m",
            "headrace_operator.main",
            "--namespace",
            namespace,
            "--metrics-port",
            "0",
        ]
        self._command += ["--engine-image", image, "--router-image", image]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._log.write_bytes(b"")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            eventually(lambda: re.search(r"probes on port (\d+)", self._log.read_text()), 60)
            eventually(self._is_ready, 60)
        except AssertionError as error:
            raise AssertionError(f"the operator does not start:\n{self._log.read_text()}") from error

    def stop(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(timeout=30) == 0, self._log.read_text()
            self._process = None

    @property
    def _url(self) -> str:
        found = re.search(r"probes on port (\d+)", self._log.read_text())
        assert found
        return f"http://127.0.0.1:{found[1]}"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def num_writes(self) -> float:
        """Requests so far that could change something."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=5) as response:
            text = response.read().decode()
        writes = re.findall(r'api_calls_total\{kind="\w+",verb="(?:apply|apply_status|delete|create)"\} (\S+)', text)
        return sum(map(float, writes))
