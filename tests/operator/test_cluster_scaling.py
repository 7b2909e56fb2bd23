"""Scaling from outside on a real API server: kubectl scale, a real HorizontalPodAutoscaler, and who owns the count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "scaled"
SCALER = f"{names.SCALER_PLURAL}.{names.GROUP}"


def deployment(cluster: Cluster, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """One prefill group and one decode group of stand-ins, scaled from outside."""
    return resource(
        {
            "metadata.name": NAME,
            "spec.engine": {"image": cluster.operator_image},
            "spec.drainTimeoutSeconds": 2,
            "spec.router": {"replicas": 0},
            "spec.roles.0.template": kube.OVERLAY,
            "spec.roles.1.template": kube.OVERLAY,
            "spec.scaling": {"mode": "External"},
            **(changes or {}),
        }
    )


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    name = f"operator-scaling-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def serving(cluster: Cluster, namespace: kube.Namespace) -> kube.Namespace:
    """The deployment with its scalers at 1."""
    namespace.apply(deployment(cluster))
    for role in ("prefill", "decode"):
        eventually(lambda role=role: namespace.get(SCALER, f"{NAME}-{role}"))
        namespace.run("scale", SCALER, f"{NAME}-{role}", "--replicas=1")
    namespace.wait_ready(NAME)
    return namespace


def status(namespace: kube.Namespace, role: str) -> dict[str, Any]:
    return dict((namespace.get(SCALER, f"{NAME}-{role}") or {}).get("status") or {})


def test_kubectl_scales_one_role(serving: kube.Namespace) -> None:
    before = serving.pod_uids(NAME)
    serving.run("scale", SCALER, f"{NAME}-prefill", "--replicas=2")
    eventually(lambda: len(serving.pod_uids(NAME, "prefill")) == 2)
    serving.wait_ready(NAME)
    eventually(lambda: status(serving, "prefill").get("replicas") == 2)
    assert before.items() <= serving.pod_uids(NAME).items()


def test_the_scale_subresource_names_the_leaders(serving: kube.Namespace) -> None:
    group = f"/apis/{names.API_VERSION}/namespaces/{serving.name}/{names.SCALER_PLURAL}"
    eventually(lambda: status(serving, "decode"))
    scale = json.loads(serving.run("get", "--raw", f"{group}/{NAME}-decode/scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 1
    chosen = json.loads(serving.run("get", "pods", "-l", scale["status"]["selector"], "-o", "json"))["items"]
    assert [pod["metadata"]["labels"][names.LABEL_POD_INDEX] for pod in chosen] == ["0"]


@pytest.mark.long
def test_an_autoscaler_scales_and_an_apply_does_not_undo_it(cluster: Cluster, serving: kube.Namespace) -> None:
    # At fewer groups than minReplicas an autoscaler acts without any metric, so none has to be served here.
    target = {"apiVersion": names.API_VERSION, "kind": names.SCALER_KIND, "name": f"{NAME}-decode"}
    load = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    serving.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": NAME},
            "spec": {
                "scaleTargetRef": target,
                "minReplicas": 2,
                "maxReplicas": 4,
                "metrics": [{"type": "Resource", "resource": load}],
            },
        }
    )
    try:
        eventually(lambda: len(serving.pod_uids(NAME, "decode")) == 2)
        hpa = serving.get("hpa", NAME) or {}
        able = next(c for c in hpa["status"]["conditions"] if c["type"] == "AbleToScale")
        assert able["status"] == "True"
        serving.apply(deployment(cluster, {"spec.drainTimeoutSeconds": 3}))
        serving.wait_ready(NAME)
        assert len(serving.pod_uids(NAME, "decode")) == 2
    finally:
        serving.run("delete", "hpa", NAME)


def test_a_ratio_cuts_a_wish_and_says_so(cluster: Cluster, serving: kube.Namespace) -> None:
    ratio = {"max": {"prefill": 1, "decode": 1}}
    serving.apply(deployment(cluster, {"spec.scaling": {"mode": "External", "ratio": ratio}}))
    serving.run("scale", SCALER, f"{NAME}-prefill", "--replicas=3")
    eventually(lambda: serving.condition(NAME, names.SCALING_LIMITED).get("status") == "True")
    assert "prefill is wished at 3" in serving.condition(NAME, names.SCALING_LIMITED)["message"]
    assert len(serving.pod_uids(NAME, "prefill")) == 1
    serving.run("scale", SCALER, f"{NAME}-decode", "--replicas=2")
    eventually(lambda: len(serving.pod_uids(NAME, "prefill")) == 2)


def test_back_to_static_the_scalers_go(cluster: Cluster, serving: kube.Namespace) -> None:
    serving.apply(deployment(cluster, {"spec.scaling": {"mode": "Static"}, "spec.roles.1.replicas": 2}))
    eventually(lambda: not serving.list(SCALER, NAME))
    eventually(lambda: len(serving.pod_uids(NAME, "decode")) == 2)
    assert serving.condition(NAME, names.SCALING_LIMITED) == {}
    serving.run("delete", "dd", NAME)
    eventually(lambda: not serving.list(f"pods,{SCALER}", NAME))
