"""Random operations against ten deployments on two pretended racks; when it is quiet the cluster is as the specs say.

SOAK_SEED (default: drawn), SOAK_OPERATIONS (200) and SOAK_SECONDS (300, for the operations; quiet takes up to three
minutes more) say what is run. The seed and the number of operations are printed, and after a failure the last of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from e2e.cluster.onemachine.daemons import Daemons
from e2e.cluster.onemachine.layout import PROJECT_ROOT, Layout, default_cache
from e2e.support.cluster import Cluster
from e2e.support.headrace import OPERATOR_NAMESPACE
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.soak import Wish, dealt, what_is_wrong
from tests.operator.test_cluster_capacity import run_kwok

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

NUM_DEPLOYMENTS = 10
NUM_NODES = 36
MAX_LOST_NODES = 3
MAX_API_RESTARTS = 2
QUIET_SECONDS = 180
STEADY_SECONDS = 10
STEADY_LIMIT_SECONDS = 60  # until nothing is written for so long
CHILD_KINDS = "pods,services,poddisruptionbudgets,controllerrevisions,serviceaccounts,roles,rolebindings,deployments"
# How often each is drawn, of the sum of all; each happens at least once.
WEIGHTS = {
    "scale": 30,
    "change_image": 20,
    "change_size": 10,
    "delete_pod": 20,
    "fail_pod": 10,
    "take_label": 5,
    "replace_deployment": 5,
    "kill_operator": 4,
    "lose_node": 2,
    "restart_api_server": 1,
}


class Soak:
    """The operations, and what has come of them so far."""

    def __init__(self, namespace: kube.Namespace, seed: int) -> None:
        self.namespace = namespace
        self.random = random.Random(seed)
        self.wishes = {f"d{i}": Wish(f"d{i}", is_placed=i % 2 == 0) for i in range(NUM_DEPLOYMENTS)}
        self.num_failures: Counter[str] = Counter()
        self.lost_nodes: list[str] = []
        self.num_api_restarts = 0
        self.log: list[str] = []

    def run(self, num_operations: int, seconds: float) -> None:
        self.namespace.run(
            "apply", "--server-side", "-f", "-", body=self._list([w.body() for w in self.wishes.values()])
        )
        deadline = time.monotonic() + seconds
        for operation in dealt(WEIGHTS, num_operations, self.random):
            if time.monotonic() >= deadline:
                return
            did = getattr(self, operation)(self.random.choice(sorted(self.wishes)))
            self.log.append(f"{operation}: {did}")
            time.sleep(self.random.choice((0.0, 0.0, 0.3, 1.0)))

    @staticmethod
    def _list(bodies: list[dict[str, Any]]) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "List", "items": bodies}

    def _wish(self, wish: Wish) -> str:
        self.wishes[wish.name] = wish
        self.namespace.apply(wish.body())
        return str(wish)

    def scale(self, name: str) -> str:
        return self._wish(replace(self.wishes[name], replicas=(self.random.randint(0, 3), self.random.randint(0, 2))))

    def change_image(self, name: str) -> str:
        """To a new one, or back to an old one."""
        return self._wish(replace(self.wishes[name], image=self.random.randint(1, 5)))

    def change_size(self, name: str) -> str:
        return self._wish(replace(self.wishes[name], decode_pods=self.random.randint(1, 3)))

    def _pod(self, name: str) -> str | None:
        pods = sorted(self.namespace.pod_uids(name))
        return self.random.choice(pods) if pods else None

    def delete_pod(self, name: str) -> str:
        pod = self._pod(name)
        if pod:
            self.num_failures[name] += 1  # a pod that vanishes unseen counts as one that failed
            force = self.random.choice(([], ["--force", "--grace-period=0"]))
            self.namespace.run("delete", "pod", pod, "--wait=false", "--ignore-not-found", *force)
        return str(pod)

    def fail_pod(self, name: str) -> str:
        pod = self._pod(name)
        if pod:
            self.num_failures[name] += 1
            patch = json.dumps({"status": {"phase": "Failed", "reason": "Evicted", "message": "by the soak"}})
            self._may_be_gone("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", patch)
        return str(pod)

    def take_label(self, name: str) -> str:
        """Of those that the operator reads, but not the ones that it watches by."""
        pod = self._pod(name)
        label = self.random.choice((names.LABEL_LLM_D_ROLE, names.LABEL_KV_FINGERPRINT, names.LABEL_COMPONENT))
        if pod:
            self._may_be_gone("label", "pod", pod, f"{label}-")
        return f"{label} of {pod}"

    def _may_be_gone(self, *arguments: str) -> None:
        try:
            self.namespace.run(*arguments)
        except RuntimeError as error:
            if "not found" not in str(error).lower():
                raise

    def replace_deployment(self, name: str) -> str:
        """Delete it, and make one of the same name as soon as that is possible."""
        how = self.random.choice(("background", "foreground", "orphan"))
        try:
            self.namespace.run("delete", "dd", name, f"--cascade={how}", "--timeout=60s")
        except RuntimeError as error:
            # Garbage collection that listed pods anew, after an outage, goes on trying to orphan those that were
            # replaced meanwhile ("metadata.uid: field is immutable"). People take the finalizer away then.
            if how != "orphan" or not self.num_api_restarts or "timed out" not in str(error):
                raise
            self.namespace.run("patch", "dd", name, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
        if how == "orphan":  # nobody's objects block their names until somebody takes them away
            selector = f"{names.LABEL_DEPLOYMENT}={name}"
            # By force: no operator may touch nobody's pods, and those on a lost node would stay for ever.
            self.namespace.run("delete", CHILD_KINDS, "-l", selector, "--force", "--grace-period=0")
        self.num_failures[name] = 0
        return f"{how}: {self._wish(self.wishes[name])}"

    def kill_operator(self, name: str) -> str:
        operator = kube.Namespace(self.namespace.cluster, OPERATOR_NAMESPACE)
        operator.run("delete", "pod", "-l", kube.OPERATOR_SELECTOR, "--force", "--grace-period=0")
        return "done"

    def lose_node(self, name: str) -> str:
        """Take a node away from those who keep it alive: nobody says that its pods have ended."""
        if len(self.lost_nodes) == MAX_LOST_NODES:
            return "not again"
        listed = json.loads(self.namespace.run("get", "pods", "-l", names.LABEL_DEPLOYMENT, "-o", "json"))["items"]
        nodes = sorted({pod["spec"].get("nodeName", "") for pod in listed} - {"", *self.lost_nodes})
        if not nodes:
            return "none has pods"
        self.lost_nodes.append(self.random.choice(nodes))
        self.namespace.run("label", "node", self.lost_nodes[-1], "headrace.dev/node-kind-")
        return self.lost_nodes[-1]

    def restart_api_server(self, name: str) -> str:
        if self.num_api_restarts == MAX_API_RESTARTS:
            return "not again"
        self.num_api_restarts += 1
        layout = Layout(default_cache())
        Daemons(layout.run, layout.logs).stop("kube-apiserver")
        command = [sys.executable, str(PROJECT_ROOT / "e2e/cluster/cluster.py"), "up"]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
        return "done"

    def play_kubelet(self, pods: list[dict[str, Any]]) -> None:
        """Make pods ready again that were made unready because the heartbeats of their node came late, as after an
        outage of the API server: what a kubelet does, and kwok does not."""
        for pod in pods:
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
            is_due = conditions.get("Ready") == "False" and conditions.get(names.GATE_SERVING, "True") == "True"
            if is_due and pod["status"]["phase"] == "Running" and pod["spec"].get("nodeName") not in self.lost_nodes:
                patch = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
                self._may_be_gone("patch", "pod", pod["metadata"]["name"], "--subresource=status", "-p", patch)

    def problems(self) -> list[str]:
        """All that is not as the specs say."""
        listed = json.loads(self.namespace.run("get", CHILD_KINDS, "-l", names.LABEL_DEPLOYMENT, "-o", "json"))["items"]
        deployments = {
            b["metadata"]["name"]: b for b in json.loads(self.namespace.run("get", "dd", "-o", "json"))["items"]
        }
        self.play_kubelet([body for body in listed if body["kind"] == "Pod"])
        children: dict[str, list[dict[str, Any]]] = {name: [] for name in self.wishes}
        for body in listed:
            children.setdefault(body["metadata"]["labels"][names.LABEL_DEPLOYMENT], []).append(body)
        return [
            problem
            for name, wish in self.wishes.items()
            for problem in what_is_wrong(wish, deployments.get(name), children[name], self.num_failures[name])
        ]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    if not cluster.is_one_machine:
        pytest.skip("nodes and the API server are only taken away on the one-machine cluster")
    run_kwok("up", str(NUM_NODES))
    name = f"soak-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    run_kwok("up", str(NUM_NODES))  # gives lost nodes their label back, by which they are removed
    run_kwok("down")


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    try:
        eventually(holds, seconds)
    except AssertionError:
        return False
    return True


def writes_nothing(operator: kube.Operator) -> bool:
    """Whether it leaves the API server alone for a while."""
    before = operator.num_writes()
    time.sleep(STEADY_SECONDS)
    return operator.num_writes() == before


def test_after_random_operations_the_cluster_is_as_the_specs_say(cluster: Cluster, namespace: kube.Namespace) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
    soak = Soak(namespace, seed)
    print(f"SOAK_SEED={seed}", flush=True)
    try:
        soak.run(int(os.environ.get("SOAK_OPERATIONS", 200)), float(os.environ.get("SOAK_SECONDS", 300)))
        print(f"{len(soak.log)} operations: {dict(Counter(line.partition(':')[0] for line in soak.log))}", flush=True)
        print(f"lost nodes: {soak.lost_nodes}; restarts of the API server: {soak.num_api_restarts}", flush=True)
        assert within(QUIET_SECONDS, lambda: not soak.problems()), "\n".join(soak.problems())
        assert within(STEADY_LIMIT_SECONDS, lambda: writes_nothing(kube.Operator(cluster)))
        assert soak.problems() == []
    except BaseException:
        print(f"SOAK_SEED={seed}; the last operations were:", *soak.log[-30:], sep="\n", flush=True)
        raise
