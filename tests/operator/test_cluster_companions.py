"""ComputeDomains, device claims and gangs on a real API server and scheduler, with pretended nodes.

NVIDIA's driver and Volcano are not there, and Kueue is only in `test_cluster_kueue.py`: the tests install definitions
with the fields of the published ones. What the driver would do, which is to make the claim template that a domain
names, is done by hand. The scheduler's own gangs are the real thing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource
from tests.operator.test_cluster_capacity import ON_RACKS, PORT, all_groups_ready, occupier, run_kwok

from headrace_operator import names

# Other modules make and remove pretended nodes too.
pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(300)]

NUM_NODES = 3
DRIVER = "devices.headrace.example"
PLURAL = "computedomains"
DEFINITIONS = ["computedomains.resource.nvidia.com", "podgroups.scheduling.volcano.sh", "localqueues.kueue.x-k8s.io"]


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[None]:
    """Pretended nodes of one rack, and devices that a driver offers on every node."""
    if not cluster.is_one_machine:
        pytest.skip("pretended nodes are only made on the one-machine cluster")
    run_kwok("up", str(NUM_NODES))
    everywhere = kube.Namespace(cluster, "default")
    everywhere.apply({"apiVersion": "v1", "kind": "List", "items": [device_class(), devices()]})
    yield
    cluster.kubectl("delete", "deviceclass,resourceslice", DRIVER, "--ignore-not-found")
    run_kwok("down")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, nodes: None) -> Iterator[kube.Namespace]:
    name = f"companions-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=true", "--timeout=80s")
    cluster.kubectl("delete", "crd", *DEFINITIONS, "--ignore-not-found", "--wait=true")


def device_class() -> dict[str, Any]:
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [selector]},
    }


def devices() -> dict[str, Any]:
    pool = {"name": "all", "generation": 1, "resourceSliceCount": 1}
    offered = [{"name": f"device-{index}"} for index in range(16)]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": DRIVER},
        "spec": {"driver": DRIVER, "pool": pool, "allNodes": True, "devices": offered},
    }


def claim_template(name: str) -> dict[str, Any]:
    request = {"name": "one", "exactly": {"deviceClassName": DRIVER}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def definition(group: str, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A CustomResourceDefinition."""
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def compute_domains() -> dict[str, Any]:
    """ComputeDomain: the spec may not change, and its channel is required."""
    template = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    channel = {
        "type": "object",
        "required": ["resourceClaimTemplate"],
        "properties": {
            "resourceClaimTemplate": template,
            "allocationMode": {"type": "string", "enum": ["All", "Single"], "default": "Single"},
        },
    }
    spec = {
        "type": "object",
        "required": ["channel"],
        "properties": {"numNodes": {"type": "integer", "minimum": 0, "default": 0}, "channel": channel},
        "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "A computeDomain.spec is immutable"}],
    }
    return definition("resource.nvidia.com", "v1beta1", names.COMPUTE_DOMAIN_KIND, spec)


def pod_groups() -> dict[str, Any]:
    """Volcano's PodGroup."""
    fields = {"minMember": {"type": "integer", "format": "int32"}, "queue": {"type": "string"}}
    return definition("scheduling.volcano.sh", "v1beta1", names.VOLCANO_KIND, {"type": "object", "properties": fields})


def local_queues() -> dict[str, Any]:
    """Kueue's LocalQueue, which stands for all of Kueue."""
    fields = {"clusterQueue": {"type": "string"}}
    return definition("kueue.x-k8s.io", "v1beta1", "LocalQueue", {"type": "object", "properties": fields})


def ganged(gang: str, **changes: Any) -> dict[str, Any]:
    """One group of two pods, as a gang."""
    queue = {"queue": "team-a"} if gang == names.GANG_KUEUE else {}
    return resource(
        {
            "metadata.name": gang.lower(),
            "spec.placement": {"gang": gang, **queue},
            "spec.drainTimeoutSeconds": 0,
            "spec.router": {"replicas": 0},
            "spec.roles": [
                {
                    "name": "unified",
                    "parallelism": {"data": 2, "dataLocal": 1, "expert": True},
                    "template": {**ON_RACKS, **changes},
                }
            ],
        }
    )


def missing(namespace: kube.Namespace, name: str) -> str:
    """What a deployment says that it waits for; empty if it does not."""
    condition = namespace.condition(name, names.PROGRESSING)
    is_missing = (condition.get("status"), condition.get("reason")) == ("False", names.REASON_API_MISSING)
    return str(condition["message"]) if is_missing else ""


def deployment(decode_groups: int) -> dict[str, Any]:
    """A prefill group of a pod whose device a driver hands out, and decode groups of two pods with a domain each."""
    return resource(
        {
            "metadata.name": "flash",
            "spec.placement": {"group": "SameDomain", "computeDomain": True},
            "spec.drainTimeoutSeconds": 0,
            "spec.router": {"replicas": 0},
            "spec.roles.0.resources": {"claims": [{"name": "gpus", "resourceClaimTemplateName": "gpu"}]},
            "spec.roles.0.template": ON_RACKS,
            "spec.roles.1.replicas": decode_groups,
            "spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True},
            "spec.roles.1.template": ON_RACKS,
        }
    )


def test_a_group_waits_for_the_api_then_gets_a_domain_and_loses_it_with_its_last_pod(
    namespace: kube.Namespace,
) -> None:
    namespace.apply(claim_template("gpu"))
    namespace.apply(deployment(decode_groups=2))
    assert "install NVIDIA's DRA driver" in eventually(lambda: missing(namespace, "flash"))
    assert len(namespace.pod_uids("flash", "prefill")) == 1, "what needs no domain is made"
    assert not namespace.pod_uids("flash", "decode")

    namespace.apply(compute_domains())
    eventually(lambda: len(namespace.pod_uids("flash", "decode")) == 4)
    domains = [domain["metadata"]["name"] for domain in namespace.list(PLURAL, "flash")]
    assert len(domains) == 2
    assert not all_groups_ready(namespace, "flash"), "its pods claim channels of domains that nobody has set up"
    for name in domains:
        namespace.apply(claim_template(name))
    eventually(lambda: all_groups_ready(namespace, "flash"))

    namespace.apply(deployment(decode_groups=1))
    eventually(lambda: len(namespace.list(PLURAL, "flash")) == 1)
    assert len(namespace.pod_uids("flash", "decode")) == 2


def test_the_scheduler_binds_all_pods_of_a_group_or_none(namespace: kube.Namespace) -> None:
    taken = [occupier(index) for index in range(NUM_NODES - 1)]
    namespace.apply({"apiVersion": "v1", "kind": "List", "items": taken})
    eventually(lambda: all(node_of(namespace, pod["metadata"]["name"]) for pod in taken))
    port = {"name": "engine", "ports": [{"name": "taken", "containerPort": PORT, "hostPort": PORT}]}
    namespace.apply(ganged(names.GANG_NATIVE, podSpec={"containers": [port]}))
    pods = eventually(lambda: len(uids := namespace.pod_uids("native")) == 2 and list(uids))
    # One of them finds no node, which the scheduler says; the other would have one to itself.
    eventually(lambda: any(is_unschedulable(namespace, pod) for pod in pods))
    assert not any(node_of(namespace, pod) for pod in pods)
    namespace.run("delete", "pod", taken[0]["metadata"]["name"], "--wait=false")
    eventually(lambda: all_groups_ready(namespace, "native"))
    assert len({node_of(namespace, pod) for pod in pods}) == 2
    (workload,) = namespace.list("workloads.scheduling.k8s.io", "native")
    assert workload["spec"]["podGroups"][0]["policy"] == {"gang": {"minCount": 2}}
    namespace.run("delete", "dd", "native")
    eventually(lambda: not namespace.list("workloads.scheduling.k8s.io", "native"))


def node_of(namespace: kube.Namespace, pod: str) -> str:
    return str(((namespace.get("pod", pod) or {}).get("spec") or {}).get("nodeName") or "")


def is_unschedulable(namespace: kube.Namespace, pod: str) -> bool:
    conditions = ((namespace.get("pod", pod) or {}).get("status") or {}).get("conditions") or []
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)


def test_groups_wait_for_volcano_and_kueue_and_are_left_to_them(namespace: kube.Namespace) -> None:
    for gang in (names.GANG_VOLCANO, names.GANG_KUEUE):
        namespace.apply(ganged(gang))
    assert "install Volcano" in eventually(lambda: missing(namespace, "volcano"))
    assert "install Kueue" in eventually(lambda: missing(namespace, "kueue"))
    assert not namespace.pod_uids("volcano")
    namespace.apply({"apiVersion": "v1", "kind": "List", "items": [pod_groups(), local_queues()]})
    eventually(lambda: len(namespace.pod_uids("volcano")) == len(namespace.pod_uids("kueue")) == 2)
    (group,) = namespace.list("podgroups.scheduling.volcano.sh", "volcano")
    assert group["spec"] == {"minMember": 2}
    for pod in namespace.list("pods", "volcano"):
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
        assert "nodeName" not in pod["spec"], "no other scheduler takes them"
    events = ["get", "events", "--field-selector=reason=GangIgnored", "-o", "jsonpath={.items[*].message}"]
    assert "switch on its integration" in eventually(lambda: namespace.run(*events)), "there is no Kueue at work"
    kueue = namespace.list("pods", "kueue")
    assert {pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for pod in kueue} == {"team-a"}
    assert len({pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in kueue}) == 1
