"""Groups as gangs of Kueue: the real Kueue admits them by quota, on pretended racks and on real nodes.

Kueue is built from its sources and installed with its chart (`e2e/support/kueue.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.support import kueue
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import OVERLAY, eventually
from tests.operator.rule_cases import resource
from tests.operator.test_cluster_capacity import NODES_PER_RACK, ON_RACKS, all_groups_ready, run_kwok
from tests.operator.test_cluster_failures import node_command

from headrace_operator import names

# The first test may have to build Kueue.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

WORKLOADS = "workloads.kueue.x-k8s.io"
GATE = "kueue.x-k8s.io/admission"
RACK_FLAVOR = "kueue-rack"
NODE_FLAVOR = "kueue-nodes"
RACK_LABEL = "nvidia.com/gpu.clique"


@pytest.fixture(scope="module")
def queues(cluster: Cluster) -> Iterator[None]:
    """Kueue with room for one group on the racks, and for one on the real nodes."""
    if not cluster.is_one_machine:
        pytest.skip("Kueue is only installed on the one-machine cluster")
    run_kwok("up", str(NODES_PER_RACK))
    try:
        # Beside the operator, so that other nodes can be lost.
        with kueue.installed(cluster, next(iter(kube.Operator(cluster).nodes()))):
            everywhere = kube.Namespace(cluster, "default")
            # A flavor's labels become node selectors of the pods when they are let through.
            everywhere.apply(flavor(RACK_FLAVOR, {RACK_LABEL: "clique-0"}))
            everywhere.apply(flavor(NODE_FLAVOR, {}))
            everywhere.apply(cluster_queue(RACK_FLAVOR, "nvidia.com/gpu", 8))
            everywhere.apply(cluster_queue(NODE_FLAVOR, "pods", 2))
            yield
    finally:
        run_kwok("down")


@pytest.fixture
def namespace(cluster: Cluster, queues: None) -> Iterator[kube.Namespace]:
    """Empty, with the LocalQueues `racks` and `nodes`."""
    name = f"kueue-{os.getpid()}"
    labels = {kueue.NAMESPACE_LABEL: "true"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.apply(body)
    namespace = kube.Namespace(cluster, name)
    namespace.apply(local_queue("racks", RACK_FLAVOR))
    namespace.apply(local_queue("nodes", NODE_FLAVOR))
    yield namespace
    cluster.kubectl("delete", "namespace", name, "--wait=true", "--timeout=80s")


def flavor(name: str, labels: dict[str, str]) -> dict[str, Any]:
    spec = {"nodeLabels": labels} if labels else {}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec}


def cluster_queue(flavor: str, resource: str, quota: int) -> dict[str, Any]:
    """A ClusterQueue named as its flavor, with so much of one resource."""
    flavors = [{"name": flavor, "resources": [{"name": resource, "nominalQuota": quota}]}]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": flavor},
        "spec": {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": [resource], "flavors": flavors}],
        },
    }


def local_queue(name: str, cluster_queue: str) -> dict[str, Any]:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": name},
        "spec": {"clusterQueue": cluster_queue},
    }


def on_racks(name: str) -> dict[str, Any]:
    """One group of two pods of 4 GPUs each."""
    return queued(name, "racks", {"data": 8, "dataLocal": 4, "expert": True}, {"gpu": 4}, ON_RACKS)


def on_nodes(name: str, **template: Any) -> dict[str, Any]:
    """One group of two pods that run."""
    return queued(name, "nodes", {"data": 2, "dataLocal": 1, "expert": True}, {}, {**OVERLAY, **template})


def queued(
    name: str, queue: str, parallelism: dict[str, Any], resources: dict[str, Any], template: dict[str, Any]
) -> dict[str, Any]:
    role = {"name": "unified", "parallelism": parallelism, "resources": resources, "template": template}
    return resource(
        {
            "metadata.name": name,
            "spec.placement": {"gang": names.GANG_KUEUE, "queue": queue},
            "spec.drainTimeoutSeconds": 0,
            "spec.restartPolicy": {"nodeLossSeconds": 5},
            "spec.router": {"replicas": 0},
            "spec.roles": [role],
        }
    )


def gated(namespace: kube.Namespace, name: str) -> list[str]:
    """The pods that Kueue has not let through."""
    return [
        pod["metadata"]["name"]
        for pod in namespace.list("pods", name)
        if any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or [])
    ]


def gangs(namespace: kube.Namespace, name: str) -> set[str]:
    return {pod["metadata"]["labels"][names.LABEL_KUEUE_GROUP] for pod in namespace.list("pods", name)}


def workloads(namespace: kube.Namespace) -> set[str]:
    return {body["metadata"]["name"] for body in namespace.cluster.list(WORKLOADS, namespace=namespace.name)}


def is_left(namespace: kube.Namespace, name: str) -> bool:
    return bool(namespace.list("pods", name))


def is_ready(namespace: kube.Namespace, name: str) -> bool:
    pod = namespace.get("pod", name) or {}
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


def why_waiting(namespace: kube.Namespace, name: str) -> str:
    condition = namespace.condition(name, names.PROGRESSING)
    return str(condition.get("message")) if condition.get("reason") == names.REASON_SCHEDULING_GATED else ""


def test_of_two_groups_one_is_let_through_whole_and_the_other_once_there_is_quota(namespace: kube.Namespace) -> None:
    namespace.apply(on_racks("first"))
    eventually(lambda: all_groups_ready(namespace, "first"), 60)
    assert {pod["spec"]["nodeSelector"][RACK_LABEL] for pod in namespace.list("pods", "first")} == {"clique-0"}

    namespace.apply(on_racks("second"))
    waiting = eventually(lambda: why_waiting(namespace, "second"), 60)
    assert len(gated(namespace, "second")) == 2
    (gang,) = gangs(namespace, "second")
    assert GATE in waiting
    assert f"kubectl describe {WORKLOADS} {gang}" in waiting
    eventually(lambda: "insufficient unused quota" in namespace.run("describe", WORKLOADS, gang), 60)

    namespace.run("delete", "dd", "first", "--timeout=60s")
    eventually(lambda: all_groups_ready(namespace, "second"), 60)
    eventually(lambda: workloads(namespace) == {gang})


def test_a_group_that_lost_a_pod_is_a_new_gang_and_is_let_through_again(namespace: kube.Namespace) -> None:
    namespace.apply(on_nodes("flash"))
    namespace.wait_ready("flash", 90)
    (before,) = gangs(namespace, "flash")
    victim, *_ = namespace.pod_uids("flash")
    namespace.kill_engine(victim)
    eventually(lambda: gangs(namespace, "flash").isdisjoint({before}) and len(namespace.pod_uids("flash")) == 2, 60)
    namespace.wait_ready("flash", 90)
    eventually(lambda: workloads(namespace) == gangs(namespace, "flash"))

    namespace.run("delete", "dd", "flash", "--timeout=60s")
    eventually(lambda: not is_left(namespace, "flash") and not workloads(namespace), 60)


def test_a_group_leaves_a_node_that_lost_its_power_and_is_let_through_again(
    cluster: Cluster, namespace: kube.Namespace
) -> None:
    (ours,) = kube.Operator(cluster).nodes()
    cluster.kubectl("cordon", ours)
    try:
        namespace.apply(on_nodes("flash"))
        namespace.wait_ready("flash", 90)
    finally:
        cluster.kubectl("uncordon", ours)
    (before,) = gangs(namespace, "flash")
    node = namespace.list("pods", "flash")[0]["spec"]["nodeName"]
    try:
        node_command("kill", node)
        eventually(lambda: before not in (now := gangs(namespace, "flash")) and now, 120)
        namespace.wait_ready("flash", 90)
        assert node not in {pod["spec"]["nodeName"] for pod in namespace.list("pods", "flash")}
    finally:
        node_command("start", node)
        cluster.kubectl("wait", "node", node, "--for=condition=Ready", "--timeout=90s")


def test_a_group_that_kueue_evicts_queues_again_and_that_is_no_failure(namespace: kube.Namespace) -> None:
    namespace.apply(on_nodes("flash"))
    namespace.wait_ready("flash", 90)
    (before,) = gangs(namespace, "flash")
    namespace.run(
        "patch", "clusterqueue", NODE_FLAVOR, "--type=merge", "-p", '{"spec": {"stopPolicy": "HoldAndDrain"}}'
    )
    try:
        eventually(lambda: len(gated(namespace, "flash")) == 2, 60)
        assert before not in gangs(namespace, "flash")
        status = (namespace.get("dd", "flash") or {})["status"]
        assert not any(rebuild["failures"] for rebuild in status.get("rebuilds", []))
    finally:
        namespace.run("patch", "clusterqueue", NODE_FLAVOR, "--type=merge", "-p", '{"spec": {"stopPolicy": "None"}}')
    namespace.wait_ready("flash", 90)


def test_a_group_that_waits_for_quota_can_be_changed_and_deleted(namespace: kube.Namespace) -> None:
    namespace.apply(on_nodes("first"))
    namespace.wait_ready("first", 90)
    namespace.apply(on_nodes("second"))
    eventually(lambda: len(gated(namespace, "second")) == 2, 60)
    before = namespace.pod_uids("second")

    # What never had a node goes when garbage collection finds it.
    namespace.apply(on_nodes("second", labels={"round": "2"}))
    eventually(lambda: len(uids := namespace.pod_uids("second")) == 2 and not set(uids) & set(before))
    before = namespace.pod_uids("second")
    namespace.run("delete", "pod", next(iter(before)), "--wait=false")
    eventually(lambda: len(uids := namespace.pod_uids("second")) == 2 and not set(uids.values()) & set(before.values()))

    namespace.run("delete", "dd", "second", "--timeout=60s")
    eventually(lambda: not is_left(namespace, "second"))
    eventually(lambda: workloads(namespace) == gangs(namespace, "first"))


def test_a_surge_group_waits_for_quota_beside_the_old_one_which_makes_way_if_it_may(namespace: kube.Namespace) -> None:
    def strategy(when_full: str) -> dict[str, Any]:
        return {"maxSurge": 1, "maxUnavailable": 0, "whenFull": when_full}

    def changed(when_full: str) -> dict[str, Any]:
        body = on_nodes("flash", labels={"round": "2"})
        body["spec"]["rolloutStrategy"] = strategy(when_full)
        return body

    first = on_nodes("flash")
    first["spec"]["rolloutStrategy"] = strategy("Wait")
    namespace.apply(first)
    namespace.wait_ready("flash", 90)
    before = namespace.pod_uids("flash")

    namespace.apply(changed("Wait"))
    waiting = eventually(
        lambda: (c := namespace.condition("flash", names.PROGRESSING)).get("reason") == names.REASON_NO_CAPACITY and c,
        60,
    )
    assert "set whenFull: Recreate" in waiting["message"]
    assert f"kubectl describe {WORKLOADS}" in waiting["message"]
    assert len(gated(namespace, "flash")) == 2
    assert before.items() <= namespace.pod_uids("flash").items()
    assert all(is_ready(namespace, name) for name in before)

    namespace.apply(changed("Recreate"))
    eventually(lambda: not set(before) & set(namespace.pod_uids("flash")), 60)
    namespace.wait_ready("flash", 90)
    eventually(lambda: workloads(namespace) == gangs(namespace, "flash"))
