"""The operator keeps what the resource says, no more and no less."""

from __future__ import annotations

import time
from typing import Any

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster
from e2e.support.progress import wait_for

NAME = "tiny-1p1d"
LABEL = f"headrace.dev/deployment={NAME}"


@pytest.fixture(scope="module")
def deployment(cluster: Cluster, namespace: str) -> str:
    cluster.apply(headrace.example(NAME), namespace)
    headrace.wait_ready(cluster, NAME, namespace)
    return NAME


def engine_pods(cluster: Cluster, namespace: str) -> dict[str, str]:
    """uid by name of the pods that live."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in cluster.list("pods", f"{LABEL},headrace.dev/role", namespace)
        if not pod["metadata"].get("deletionTimestamp")
    }


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    """resourceVersion of everything that belongs to the deployment."""
    found: dict[str, str] = {}
    for kind in ("pods", "services", "deployments", "controllerrevisions", "serviceaccounts", "roles", "rolebindings"):
        for item in cluster.list(kind, LABEL, namespace):
            found[f"{kind}/{item['metadata']['name']}"] = item["metadata"]["resourceVersion"]
    resource: Any = cluster.get(headrace.KIND, NAME, namespace)
    found["resource"] = resource["metadata"]["resourceVersion"]
    return found


def test_printer_columns_tell_what_runs(cluster: Cluster, namespace: str, deployment: str) -> None:
    header, row = cluster.kubectl("get", "dd", deployment, "-n", namespace).strip().splitlines()
    assert header.split() == ["NAME", "READY", "PREFILL", "DECODE", "TOPOLOGY", "AGE"]
    assert row.split()[:4] == [deployment, "True", "1/1", "1/1"]


def test_every_field_is_explained(cluster: Cluster) -> None:
    text = cluster.kubectl("explain", "dd.spec.roles", "--recursive=false")
    for word in ("replicas", "parallelism", "template", "group"):
        assert word in text


def test_nothing_is_written_in_steady_state(cluster: Cluster, namespace: str, deployment: str) -> None:
    before = versions(cluster, namespace)
    time.sleep(20)
    assert versions(cluster, namespace) == before


def test_a_deleted_service_and_a_hand_edited_one_are_repaired(
    cluster: Cluster, namespace: str, deployment: str
) -> None:
    original = cluster.get("service", NAME, namespace)
    assert original is not None
    cluster.kubectl("delete", "service", NAME, "-n", namespace)
    wait_for("the service to come back", lambda: cluster.get("service", NAME, namespace), timeout_seconds=180)
    cluster.kubectl("patch", "service", NAME, "-n", namespace, "--type=merge", "-p", '{"spec":{"selector":{"a":"b"}}}')

    def repaired() -> bool:
        service = cluster.get("service", NAME, namespace)
        return service is not None and service["spec"]["selector"].items() >= original["spec"]["selector"].items()

    wait_for("the selector to be repaired", repaired, timeout_seconds=180)


def test_an_image_that_cannot_be_pulled_is_named(cluster: Cluster, namespace: str) -> None:
    broken = headrace.example("tiny-unified")
    broken["metadata"]["name"] = "broken"
    broken["spec"].setdefault("engine", {})["image"] = "127.0.0.1:5000/no-such-image:1"
    cluster.apply(broken, namespace)

    def named() -> bool:
        resource = cluster.get(headrace.KIND, "broken", namespace)
        entry = headrace.condition(resource or {}, "Ready")
        return entry.get("status") == "False" and "no-such-image" in entry.get("message", "")

    wait_for("the image to be named in status", named, timeout_seconds=180)
    cluster.kubectl("delete", "dd", "broken", "-n", namespace)
    headrace.wait_gone(cluster, "broken", namespace)


def test_a_role_template_change_replaces_only_that_role(cluster: Cluster, namespace: str, deployment: str) -> None:
    before = engine_pods(cluster, namespace)
    changed = headrace.example(NAME)
    decode = next(role for role in changed["spec"]["roles"] if role["name"] == "decode")
    decode["template"] = {**decode.get("template", {}), "annotations": {"example.org/round": "2"}}
    cluster.apply(changed, namespace)

    def rolled() -> bool:
        now = engine_pods(cluster, namespace)
        new = set(now.values()) - set(before.values())
        return bool(new) and all("decode" in name for name, uid in now.items() if uid in new)

    wait_for("new decode pods", rolled, timeout_seconds=180)
    headrace.wait_ready(cluster, NAME, namespace)
    after = engine_pods(cluster, namespace)
    kept = {name: uid for name, uid in before.items() if "prefill" in name}
    assert kept.items() <= after.items()


def test_deleting_the_resource_leaves_nothing(cluster: Cluster, namespace: str, deployment: str) -> None:
    cluster.kubectl("delete", "dd", deployment, "-n", namespace)
    headrace.wait_gone(cluster, NAME, namespace)
