"""The running cluster: what a pod can reach, and what happens to a node. Starts the cluster if it is not up."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.cluster.onemachine.layout import PROJECT_ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="the one-machine cluster needs root"),
]
CLI = ("python3", str(PROJECT_ROOT / "e2e" / "cluster" / "cluster.py"))
NODE = "node3"


def cluster(*arguments: str) -> str:
    return subprocess.run(
        [*CLI, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=1700
    ).stdout.strip()


Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def kubectl() -> Kubectl:
    kubeconfig = cluster("up")
    binary = cluster("kubectl-path")

    def call(*arguments: str, stdin: str = "") -> str:
        argv = [binary, f"--kubeconfig={kubeconfig}", *arguments]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    name = f"cluster-test-{os.getpid()}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=true")


@pytest.fixture
def restored_node(kubectl: Kubectl) -> Iterator[str]:
    yield NODE
    cluster("node", "thaw", NODE)
    cluster("node", "start", NODE)


def eventually(what: str, condition: Callable[[], bool], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not so after {timeout_seconds} s"
        time.sleep(0.5)


def node_condition(kubectl: Kubectl, node: str) -> str:
    return kubectl("get", "node", node, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}")


def test_up_when_up_changes_nothing(kubectl: Kubectl) -> None:
    records = sorted(Path(cluster("kubeconfig")).parent.joinpath("run").glob("*.json"))
    before = [record.read_text() for record in records]
    cluster("up")
    assert [record.read_text() for record in records] == before
    assert json.loads(cluster("status"))["running"]


# Asks again for a while: a Service's address takes a moment to reach the other node's proxy.
FETCH = """
import sys, time, urllib.request
deadline = time.monotonic() + 100
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=5).status)
        break
    except OSError as error:
        print(error, file=sys.stderr)
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
"""


def test_a_pod_reaches_a_service_by_name_on_another_node(kubectl: Kubectl, namespace: str) -> None:
    image = json.loads(cluster("images"))["operator"]
    program = (
        "import http.server, socketserver;"
        "socketserver.TCPServer(('', 8000), http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    server = pod("server", image, ["python3", "-c", program], node="node1", labels={"app": "server"})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    client = pod("client", image, ["python3", "-c", FETCH, f"http://web.{namespace}"], node="node2")
    for item in (server, service):
        kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(item))
    kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/server", "--timeout=150s")
    kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(client))
    kubectl("wait", "-n", namespace, "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=150s")
    assert kubectl("logs", "-n", namespace, "client").split()[-1] == "200"


@pytest.mark.long
@pytest.mark.parametrize(("end", "begin"), [("kill", "start"), ("freeze", "thaw")], ids=["power cut", "hang"])
def test_a_lost_node_is_noticed_and_comes_back(kubectl: Kubectl, restored_node: str, end: str, begin: str) -> None:
    cluster("node", end, restored_node)
    eventually("the node is missed", lambda: node_condition(kubectl, restored_node) == "Unknown", 60)
    cluster("node", begin, restored_node)
    eventually("the node is back", lambda: node_condition(kubectl, restored_node) == "True", 60)


def test_a_node_that_is_not_running_cannot_be_frozen(kubectl: Kubectl, restored_node: str) -> None:
    cluster("node", "kill", restored_node)
    done = subprocess.run([*CLI, "node", "freeze", restored_node], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"error: {restored_node} is not running" in done.stderr


def pod(
    name: str, image: str, command: list[str], *, node: str, labels: dict[str, str] | None = None
) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "terminationGracePeriodSeconds": 1,  # nothing in it listens to SIGTERM
            "restartPolicy": "Never",
            "nodeName": node,
            "containers": [{"name": "main", "image": image, "command": command}],
        },
    }
