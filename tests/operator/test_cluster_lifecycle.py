"""Life and death of a resource on a real API server: deletion in all its forms, adoption, re-application."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from e2e.support.cluster import REPOSITORY, Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "mortal"
CRD = f"{names.PLURAL}.{names.GROUP}"


def deployment(cluster: Cluster, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """One group of stand-ins for each role."""
    return resource(
        {
            "metadata.name": NAME,
            "spec.engine": {"image": cluster.operator_image},
            "spec.drainTimeoutSeconds": 2,
            "spec.router": {"replicas": 0},
            "spec.roles.0.template": {**kube.OVERLAY, "labels": {"a": "1", "b": "2"}},
            "spec.roles.1.template": kube.OVERLAY,
            **(changes or {}),
        }
    )


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    """A fresh namespace with the deployment, ready."""
    name = f"operator-life-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    cluster.kubectl("create", "namespace", name)
    namespace = kube.Namespace(cluster, name)
    namespace.apply(deployment(cluster))
    namespace.wait_ready(NAME)
    yield namespace
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def created(namespace: kube.Namespace) -> list[str]:
    """What the operator said that it made, in its events."""
    text = namespace.run("get", "events", "--field-selector", "reason=GroupCreated", "-o", "json")
    return [event["message"] for event in json.loads(text)["items"]]


@pytest.mark.parametrize("cascade", ["foreground", "background"])
def test_deletion_creates_nothing_and_leaves_nothing(namespace: kube.Namespace, cascade: str) -> None:
    before = sorted(created(namespace))
    seen = set(namespace.pod_uids(NAME).values())
    namespace.run("delete", "dd", NAME, f"--cascade={cascade}", "--wait=false")
    gone = False
    deadline = time.monotonic() + 90
    while not gone and time.monotonic() < deadline:
        assert set(namespace.pod_uids(NAME).values()) <= seen, "a pod was made during the deletion"
        gone = namespace.get("dd", NAME) is None and not namespace.list("pods,services,controllerrevisions", NAME)
        time.sleep(0.2)
    assert gone
    assert sorted(created(namespace)) == before


def test_a_successor_of_the_same_name_does_not_adopt_what_was_left(cluster: Cluster, namespace: kube.Namespace) -> None:
    left = namespace.pod_uids(NAME)
    namespace.run("delete", "dd", NAME, "--cascade=orphan")
    namespace.apply(deployment(cluster))
    eventually(lambda: namespace.condition(NAME, names.READY).get("reason") == names.REASON_NAME_TAKEN)
    assert namespace.pod_uids(NAME) == left
    namespace.run("delete", "pods,services,controllerrevisions,deployments", "--all", "--wait=false")
    namespace.run("delete", "serviceaccounts,roles,rolebindings", "-l", f"{names.LABEL_DEPLOYMENT}={NAME}")
    namespace.wait_ready(NAME)
    assert not set(namespace.pod_uids(NAME).values()) & set(left.values())


def test_what_newer_rules_refuse_is_reported_and_can_be_deleted(cluster: Cluster, namespace: kube.Namespace) -> None:
    """The resource was stored under a CRD that had no such rule yet."""
    crd = yaml.safe_load((REPOSITORY / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml").read_text())
    older = copy.deepcopy(crd)
    roles = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    roles["x-kubernetes-validations"] = []
    before = namespace.pod_uids(NAME)
    cluster.apply(older)
    try:
        invalid = deployment(cluster)
        invalid["spec"]["roles"] = invalid["spec"]["roles"][1:]
        eventually(lambda: _is_applied(namespace, invalid))
    finally:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
    eventually(lambda: namespace.condition(NAME, names.VALID).get("status") == "False")
    assert "prefill and decode together" in namespace.condition(NAME, names.VALID)["message"]
    assert namespace.pod_uids(NAME) == before
    namespace.run("delete", "dd", NAME)
    eventually(lambda: not namespace.list("pods", NAME))


def _is_applied(namespace: kube.Namespace, body: dict[str, Any]) -> bool:
    """Whether the API server takes it: a changed CRD takes effect within seconds."""
    try:
        namespace.apply(body)
    except RuntimeError:
        return False
    return True


def test_applied_again_in_another_order_nothing_rolls(cluster: Cluster, namespace: kube.Namespace) -> None:
    before = namespace.pod_uids(NAME)
    again = deployment(cluster)
    again["spec"] = dict(reversed(again["spec"].items()))
    again["spec"]["roles"] = [dict(reversed(role.items())) for role in reversed(again["spec"]["roles"])]
    (prefill,) = [role for role in again["spec"]["roles"] if role["name"] == "prefill"]
    prefill["template"] = {**prefill["template"], "labels": {"b": "2", "a": "1"}}
    prefill["replicas"] = 1  # a default, written out
    namespace.run("annotate", "dd", NAME, "by=somebody")
    namespace.apply(again)
    time.sleep(3)
    namespace.wait_ready(NAME)
    assert namespace.pod_uids(NAME) == before


def test_what_others_write_beside_ours_survives(cluster: Cluster, namespace: kube.Namespace) -> None:
    leader = sorted(namespace.pod_uids(NAME, "decode"))[0]
    service = names.role_service_name(NAME, names.DECODE)
    for kind, name in (("dd", NAME), ("pod", leader), ("service", service)):
        namespace.run("annotate", kind, name, "team.example.com/owner=me")
        namespace.run("label", kind, name, "team=me")
    namespace.apply(deployment(cluster, {"spec.router": {"replicas": 0, "template": {"labels": {"round": "2"}}}}))
    namespace.wait_ready(NAME)
    for kind, name in (("dd", NAME), ("pod", leader), ("service", service)):
        metadata = (namespace.get(kind, name) or {})["metadata"]
        assert metadata["annotations"]["team.example.com/owner"] == "me"
        assert metadata["labels"]["team"] == "me"


def test_labels_that_are_taken_away_come_back_and_cost_no_pod(cluster: Cluster, namespace: kube.Namespace) -> None:
    """Those by which pods are watched among them, and of one pod of a group and of all."""
    namespace.apply(deployment(cluster, {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1}}))
    namespace.wait_ready(NAME)
    before = namespace.pod_uids(NAME)
    labels = {name: (namespace.get("pod", name) or {})["metadata"]["labels"] for name in before}
    ours = [names.LABEL_MANAGED_BY, names.LABEL_ROLE, names.LABEL_REVISION, names.LABEL_GROUP, names.LABEL_POD_INDEX]
    for name in before:
        namespace.run("label", "pod", name, *(f"{label}-" for label in ours))
    for name in before:
        eventually(lambda name=name: (namespace.get("pod", name) or {})["metadata"]["labels"] == labels[name])
    namespace.wait_ready(NAME)
    assert namespace.pod_uids(NAME) == before
