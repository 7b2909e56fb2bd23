"""An operator as a process of this machine beside a real API server: watches that fall silent, rights that it lacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource
from tests.operator.silence import Silencer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = "watched"
# Rounds of comparison come every two minutes: here they do not.
LAUNCH = """
from headrace_operator import main, resync
resync.INTERVAL_SECONDS = resync.SETTLE_SECONDS = 1.0
main.main()
"""


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    name = f"operator-process-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@contextlib.contextmanager
def plain_api_server(cluster: Cluster) -> Iterator[str]:
    """host:port of a proxy of kubectl's, which needs no credentials."""
    command = [cluster.kubectl_path, "--kubeconfig", str(cluster.kubeconfig), "proxy", "--port=0"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        yield proxy.stdout.readline().split()[-1]  # Starting to serve on 127.0.0.1:41231
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)


def kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    body = {
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": user}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }
    path.write_text(json.dumps(body))
    return path


class Process:
    """An operator of this tree that serves one namespace, with what it says in a file."""

    def __init__(self, namespace: kube.Namespace, config: Path, log: Path) -> None:
        image = namespace.cluster.operator_image
        flags = [
            "--namespace",
            namespace.name,
            "--metrics-port=0",
            f"--engine-image={image}",
            f"--router-image={image}",
        ]
        self._log = log
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *flags],
                env={**os.environ, "KUBECONFIG": str(config)},
                stderr=file,
            )

    def said(self) -> str:
        return self._log.read_text()

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text of a probe; (0, "") before it listens."""
        port = re.search(r"probes on port (\d+)", self.said())
        if port is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout=30)
        finally:
            self.popen.kill()
            self.popen.wait(timeout=30)


def test_watches_that_fall_silent_fail_the_liveness_probe(
    cluster: Cluster, namespace: kube.Namespace, tmp_path: Path
) -> None:
    """It need not be told: the connections stay open, and nothing comes any more."""
    nothing = {"spec.roles.0.replicas": 0, "spec.roles.1.replicas": 0, "spec.router": {"replicas": 0}}
    images = {"spec.engine": {"image": cluster.operator_image}, "spec.router.image": cluster.operator_image}
    with plain_api_server(cluster) as server, Silencer(server) as silencer:
        operator = Process(namespace, kubeconfig(tmp_path / "config", {"server": silencer.url}, {}), tmp_path / "log")
        try:
            eventually(lambda: operator.probe("readyz")[0] == 200, 60)
            namespace.apply(resource({"metadata.name": NAME, **nothing, **images}))
            namespace.wait_ready(NAME)
            # A round without a difference has been made since.
            eventually(lambda: re.search(r"last_comparison_\w+ [1-9]", operator.probe("metrics")[1]), 60)
            assert operator.probe("healthz") == (200, "ok\n")
            silencer.is_silent.set()
            namespace.run("annotate", "dd", NAME, "by=somebody")
            eventually(lambda: operator.probe("healthz") == (503, "watches are dead\n"), 60)
            assert operator.popen.poll() is None, "to restart it is its kubelet's business"
        finally:
            assert operator.end() == 0, operator.said()


@pytest.mark.parametrize(
    ("granted", "missing"),
    [("", "disaggdeployments"), ("disaggdeployments.headrace.dev,disaggrolescalers.headrace.dev", "pods")],
    ids=["no right at all", "none but to its own kinds"],
)
def test_a_namespace_in_which_it_may_not_look_is_told_at_the_start_with_the_right(
    cluster: Cluster, namespace: kube.Namespace, tmp_path: Path, granted: str, missing: str
) -> None:
    namespace.run("create", "serviceaccount", "stranger")
    if granted:
        namespace.run("create", "role", "some", "--verb=get,list,watch", f"--resource={granted}")
        namespace.run("create", "rolebinding", "some", "--role=some", f"--serviceaccount={namespace.name}:stranger")
    raw = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    user = {"token": namespace.run("create", "token", "stranger").strip()}
    config = kubeconfig(tmp_path / "config", raw["clusters"][0]["cluster"], user)
    operator = Process(namespace, config, tmp_path / "log")
    try:
        assert operator.popen.wait(timeout=60) == 1
    finally:
        operator.end()
    (line,) = [line for line in operator.said().splitlines() if "rights are missing" in line]
    assert f'cannot list resource "{missing}"' in line
    assert f'in the namespace "{namespace.name}"' in line
    assert f"To do: list {namespace.name} in watchNamespaces of the chart" in line
    assert "Traceback" not in operator.said()
