"""Failures and disruptions on a real cluster, with stand-ins for the engine: restarts, drains of nodes, evictions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.support.cluster import REPOSITORY, Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import cli, names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "frail"


def manifest(cluster: Cluster, changes: dict[str, Any]) -> dict[str, Any]:
    """One prefill group of one pod, two decode groups of two pods, all of stand-ins, with the given changes."""
    return resource(
        {
            "metadata.name": NAME,
            "spec.engine": {"image": cluster.operator_image},
            "spec.drainTimeoutSeconds": 2,
            "spec.router": {"replicas": 0},
            "spec.restartPolicy": {"maxRestarts": 1, "nodeLossSeconds": 5},
            "spec.roles.0.template": kube.OVERLAY,
            "spec.roles.1.template": kube.OVERLAY,
            "spec.roles.1.replicas": 2,
            "spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    name = f"failures-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def serving(cluster: Cluster, namespace: kube.Namespace) -> kube.Namespace:
    namespace.apply(manifest(cluster, {}))
    namespace.wait_ready(NAME)
    return namespace


def decode_pods(namespace: kube.Namespace) -> list[dict[str, Any]]:
    return [pod for pod in namespace.list("pods", NAME) if "-decode-" in pod["metadata"]["name"]]


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def ready_groups(namespace: kube.Namespace) -> set[str]:
    """Decode groups whose two pods are ready."""
    ready = [pod["metadata"]["labels"][names.LABEL_GROUP] for pod in decode_pods(namespace) if is_ready(pod)]
    return {group for group in ready if ready.count(group) == 2}


def test_leaders_come_into_service_by_their_gate(serving: kube.Namespace) -> None:
    for pod in serving.list("pods", NAME):
        conditions = {c["type"]: c["status"] for c in pod["status"]["conditions"]}
        is_leader = pod["metadata"]["labels"][names.LABEL_POD_INDEX] == "0"
        assert conditions.get(names.GATE_SERVING) == ("True" if is_leader else None)


def test_a_group_that_is_scaled_away_leaves_its_service_before_it_is_deleted(
    cluster: Cluster, serving: kube.Namespace
) -> None:
    serving.apply(manifest(cluster, {"spec.roles.1.replicas": 1}))

    def is_out_of_service(pod: dict[str, Any]) -> bool:
        gate = [c["status"] for c in pod["status"]["conditions"] if c["type"] == names.GATE_SERVING]
        return gate == ["False"] and "deletionTimestamp" not in pod["metadata"]

    eventually(lambda: any(map(is_out_of_service, decode_pods(serving))))
    eventually(lambda: len(decode_pods(serving)) == 2)
    serving.wait_ready(NAME)


@pytest.mark.alone
def test_a_drained_node_moves_one_group_at_a_time_and_each_once(cluster: Cluster, serving: kube.Namespace) -> None:
    node = next(pod["spec"]["nodeName"] for pod in decode_pods(serving))
    before = serving.pod_uids(NAME, "decode")
    moved = {p["metadata"]["labels"][names.LABEL_GROUP] for p in decode_pods(serving) if p["spec"]["nodeName"] == node}
    selector = f"{names.LABEL_DEPLOYMENT}={NAME},{names.LABEL_ROLE}=decode"
    cluster.kubectl("cordon", node)
    try:
        deadline = time.monotonic() + 150
        while any(p["spec"].get("nodeName") == node for p in decode_pods(serving)):
            assert time.monotonic() < deadline
            # A short try each time, so that we can look in between.
            drain = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"]
            with contextlib.suppress(RuntimeError):  # in most tries not all of it may go yet
                cluster.kubectl(*drain, f"--pod-selector={selector}", "--timeout=2s", timeout_seconds=30)
            assert ready_groups(serving)
        serving.wait_ready(NAME)
    finally:
        cluster.kubectl("uncordon", node)
    after = serving.pod_uids(NAME, "decode")
    assert after.keys() == before.keys()
    changed = {name.rsplit("-", 2)[1] for name in before if before[name] != after[name]}
    assert changed == moved
    rebuilds = (serving.get("dd", NAME) or {})["status"].get("rebuilds", [])
    assert all(rebuild["failures"] == 0 for rebuild in rebuilds)


@pytest.mark.long
def test_a_group_that_keeps_failing_is_given_up_and_comes_back_when_asked(
    serving: kube.Namespace, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = next(name for name in serving.pod_uids(NAME, "prefill"))
    for _ in range(2):
        serving.wait_ready(NAME)
        uid = serving.pod_uids(NAME)[victim]
        serving.kill_engine(victim)
        eventually(lambda uid=uid: serving.condition(NAME, names.READY).get("status") == "False")
    eventually(lambda: serving.condition(NAME, names.READY)["reason"] == names.REASON_RESTARTS_EXHAUSTED)
    ready = serving.condition(NAME, names.READY)
    assert "asked to die" in ready["message"]
    assert len(serving.pod_uids(NAME, "prefill")) == 1  # the pod that ended, for its log
    assert "asked to die" in serving.run("logs", victim)
    time.sleep(5)
    assert serving.condition(NAME, names.READY) == ready
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    with pytest.raises(SystemExit) as end:
        cli.main(["retry", NAME, "-n", serving.name])
    assert end.value.code == 0
    assert "prefill group 0 is made again" in capsys.readouterr().out
    serving.wait_ready(NAME)


def node_command(command: str, node: str) -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "e2e/cluster/cluster.py"), "node", command, node], check=True)


@pytest.mark.long
def test_groups_leave_a_node_that_lost_its_power(cluster: Cluster, serving: kube.Namespace) -> None:
    if not cluster.is_one_machine:
        pytest.skip("needs a node whose power can be cut")
    ours = kube.Operator(cluster).nodes()
    victims = [pod for pod in decode_pods(serving) if pod["spec"]["nodeName"] not in ours]
    node = victims[0]["spec"]["nodeName"]
    before = serving.pod_uids(NAME, "decode")
    try:
        node_command("kill", node)
        eventually(lambda: victims[0]["metadata"]["uid"] not in serving.pod_uids(NAME).values())
        serving.wait_ready(NAME)
        assert all(pod["spec"]["nodeName"] != node for pod in decode_pods(serving))
        assert serving.pod_uids(NAME, "decode").keys() == before.keys()
        rebuilds = (serving.get("dd", NAME) or {})["status"].get("rebuilds", [])
        assert all(rebuild["failures"] == 0 for rebuild in rebuilds if rebuild["role"] == "decode")
        events = serving.run("get", "events", "-o", "jsonpath={.items[*].message}")
        assert f"node {node} does not answer" in events
    finally:
        node_command("start", node)
        cluster.kubectl("wait", "node", node, "--for=condition=Ready", "--timeout=90s")
