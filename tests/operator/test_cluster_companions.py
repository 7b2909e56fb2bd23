"""ComputeDomains and device claims on a real API server and scheduler, with pretended nodes.

NVIDIA's driver is not there: the test installs a definition of ComputeDomain with the fields of the published one, and
does by hand what the driver would do, which is to make the claim template that a domain names.
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
from tests.operator.test_cluster_capacity import ON_RACKS, all_groups_ready, run_kwok

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_NODES = 3
DRIVER = "devices.headrace.example"
PLURAL = "computedomains"
DEFINITION = f"{PLURAL}.resource.nvidia.com"


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


@pytest.fixture
def namespace(cluster: Cluster, nodes: None) -> Iterator[kube.Namespace]:
    name = f"companions-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=true", "--timeout=80s")
    cluster.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", "--wait=true")


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


def definition() -> dict[str, Any]:
    """ComputeDomain as published, without its texts: the spec may not change, and its channel is required."""
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
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {
            "group": "resource.nvidia.com",
            "scope": "Namespaced",
            "names": {"kind": names.COMPUTE_DOMAIN_KIND, "plural": PLURAL, "singular": "computedomain"},
            "versions": [version],
        },
    }


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
    waiting = eventually(
        lambda: (c := namespace.condition("flash", names.PROGRESSING)).get("reason") == names.REASON_API_MISSING and c
    )
    assert (waiting["status"], "install NVIDIA's DRA driver" in waiting["message"]) == ("False", True)
    assert len(namespace.pod_uids("flash", "prefill")) == 1, "what needs no domain is made"
    assert not namespace.pod_uids("flash", "decode")

    namespace.apply(definition())
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
