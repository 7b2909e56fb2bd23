"""A namespace of a real cluster, and the operator that the chart installed there, as tests handle them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from e2e.support.cluster import Cluster
from e2e.support.headrace import OPERATOR_NAMESPACE

from headrace_operator import names

OPERATOR_SELECTOR = "app.kubernetes.io/name=headrace-operator"

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


class Namespace:
    """One namespace: what is in it, and kubectl."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def run(self, *arguments: str, body: Any = None) -> str:
        """stdout of kubectl, given `body` as JSON on its standard input. Raises RuntimeError with its stderr."""
        text = json.dumps(body) if body is not None else None
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=text, timeout_seconds=90)

    def kill_engine(self, pod: str) -> None:
        """Have the stand-in in a pod end with code 3; the command may end with it."""
        script = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/die')"
        with contextlib.suppress(RuntimeError):
            self.run("exec", pod, "--", "python3", "-c", script)

    def apply(self, body: dict[str, Any]) -> None:
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", body=body)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.cluster.get(kind, name, self.name)

    def list(self, kind: str, deployment: str) -> list[dict[str, Any]]:
        return self.cluster.list(kind, f"{names.LABEL_DEPLOYMENT}={deployment}", self.name)

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


def eventually(check: Callable[[], Any], seconds: float = 180) -> Any:
    """Poll until `check` is true; its value. Fails after `seconds`: by far more than it takes on a busy machine."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)


class PodHistory:
    """Every change of the pods of a namespace, from a watch: the most that there ever were at once."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.most_pods = 0
        self.most_pods_on_a_node = 0

    def __enter__(self) -> Self:
        path = f"/api/v1/namespaces/{self._namespace.name}/pods"
        listed = json.loads(self._namespace.run("get", "--raw", path))
        self._nodes = {pod["metadata"]["uid"]: pod["spec"].get("nodeName", "") for pod in listed["items"]}
        version = listed["metadata"]["resourceVersion"]
        cluster = self._namespace.cluster
        url = f"{path}?watch=true&timeoutSeconds=600&resourceVersion={version}"
        command = [cluster.kubectl_path, "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", url]
        self._watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.terminate()
        self._thread.join(timeout=30)
        self._watch.wait(timeout=30)

    def _follow(self) -> None:
        assert self._watch.stdout is not None
        for line in self._watch.stdout:
            event = json.loads(line)
            uid = event["object"]["metadata"].get("uid", "")
            if event["type"] == "DELETED":
                self._nodes.pop(uid, None)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._nodes[uid] = event["object"]["spec"].get("nodeName", "")
            self.most_pods = max(self.most_pods, len(self._nodes))
            bound = Counter(node for node in self._nodes.values() if node)
            self.most_pods_on_a_node = max(self.most_pods_on_a_node, *bound.values(), 0)


class Operator:
    """The operator in the cluster: stopped and started by the size of its Deployment."""

    def __init__(self, cluster: Cluster) -> None:
        self._namespace = Namespace(cluster, OPERATOR_NAMESPACE)
        (name,) = self._namespace.run("get", "deployment", "-l", OPERATOR_SELECTOR, "-o", "name").split()
        self._name = name

    def stop(self) -> None:
        self._namespace.run("scale", self._name, "--replicas=0")
        eventually(lambda: not self._pods())

    def start(self) -> None:
        self._namespace.run("scale", self._name, "--replicas=1")
        self._namespace.run("rollout", "status", self._name, "--timeout=80s")

    def _pods(self) -> list[str]:
        return self._namespace.run("get", "pods", "-l", OPERATOR_SELECTOR, "-o", "name").split()

    def nodes(self) -> set[str]:
        """Where it runs."""
        path = "jsonpath={.items[*].spec.nodeName}"
        return set(self._namespace.run("get", "pods", "-l", OPERATOR_SELECTOR, "-o", path).split())

    def num_writes(self) -> float:
        """Requests since its start that could change something."""
        (pod,) = self._pods()
        name = pod.removeprefix("pod/")
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{name}:{names.PORT_OPERATOR}/proxy/metrics"
        text = self._namespace.run("get", "--raw", path)
        writes = re.findall(
            r'api_calls_total\{kind="\w+",verb="(?:apply|apply_status|delete|create|patch)"\} (\S+)', text
        )
        return sum(map(float, writes))
