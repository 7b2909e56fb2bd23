"""The operator on a real cluster, with stand-ins for the engine: what it makes, keeps, repairs and removes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "demo"
Deployment = Callable[..., dict[str, Any]]
KINDS = "pods,services,deployments,controllerrevisions,serviceaccounts,roles,rolebindings"


@pytest.fixture(scope="module")
def deployment(cluster: Cluster) -> Deployment:
    """Two prefill groups of one pod, one decode group of two pods, all of stand-ins, with the given changes."""

    def make(changes: dict[str, Any] | None = None, name: str = NAME) -> dict[str, Any]:
        return _deployment(cluster, changes or {}, name)

    return make


def _deployment(cluster: Cluster, changes: dict[str, Any], name: str) -> dict[str, Any]:
    return resource(
        {
            "metadata.name": name,
            "spec.engine": {"image": cluster.operator_image},  # small, and has Python
            "spec.drainTimeoutSeconds": 2,
            "spec.router": {"replicas": 0},
            "spec.roles.0.replicas": 2,
            "spec.roles.0.template": kube.OVERLAY,
            "spec.roles.1.template": kube.OVERLAY,
            "spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    name = f"operator-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> kube.Operator:
    return kube.Operator(cluster)


@pytest.fixture
def serving(namespace: kube.Namespace, deployment: Deployment) -> kube.Namespace:
    """The deployment as above, ready, whatever the test before did to it."""
    namespace.apply(deployment())
    namespace.wait_ready(NAME)
    return namespace


def test_it_becomes_ready_and_says_so_in_columns(serving: kube.Namespace) -> None:
    assert len(serving.pod_uids(NAME)) == 4
    columns = serving.run("get", "dd", NAME, "--no-headers").split()
    assert columns[:4] == [NAME, "True", "2/2", "1/1"]
    assert " ".join(columns[4:7]) == "2xDP1 + 1xDEP2"


def test_pods_of_a_group_are_on_different_nodes(serving: kube.Namespace) -> None:
    nodes = {p["spec"]["nodeName"] for p in serving.list("pods", NAME) if "decode" in p["metadata"]["name"]}
    assert len(nodes) == 2


@pytest.mark.alone
def test_nothing_is_written_while_nothing_changes(serving: kube.Namespace, operator: kube.Operator) -> None:
    # The count is of all that the operator serves: whatever else the cluster has must have settled, or be gone.
    eventually(lambda: not going_namespaces(serving))
    eventually(lambda: _writes_during(operator, 3.0) == 0)
    assert _writes_during(operator, 8.0) == 0


def going_namespaces(serving: kube.Namespace) -> list[str]:
    listed = json.loads(serving.run("get", "namespaces", "-o", "json"))["items"]
    return [one["metadata"]["name"] for one in listed if one["status"]["phase"] == "Terminating"]


def _writes_during(operator: kube.Operator, seconds: float) -> float:
    before = operator.num_writes()
    time.sleep(seconds)
    return operator.num_writes() - before


@pytest.mark.alone
def test_a_restart_of_the_operator_changes_nothing(serving: kube.Namespace, operator: kube.Operator) -> None:
    before = serving.pod_uids(NAME)
    operator.stop()
    operator.start()
    time.sleep(5)
    assert serving.pod_uids(NAME) == before
    assert operator.num_writes() == 0


def test_a_group_that_loses_a_process_is_replaced_as_a_whole(serving: kube.Namespace) -> None:
    before = serving.pod_uids(NAME)
    victim = next(name for name in before if "decode" in name and name.endswith("-1"))
    serving.kill_engine(victim)
    eventually(lambda: not set(serving.pod_uids(NAME, "decode").values()) & set(before.values()))
    serving.wait_ready(NAME)
    after = serving.pod_uids(NAME)
    assert set(after) == set(before)
    assert {n: u for n, u in after.items() if "prefill" in n} == {n: u for n, u in before.items() if "prefill" in n}
    (rebuild,) = (serving.get("dd", NAME) or {})["status"]["rebuilds"]
    assert (rebuild["role"], rebuild["failures"]) == ("decode", 1)
    assert "exited with code 3" in rebuild["message"]
    assert "asked to die" in rebuild["message"]


@pytest.mark.alone
def test_a_failure_while_the_operator_is_away_is_mended_once(serving: kube.Namespace, operator: kube.Operator) -> None:
    before = serving.pod_uids(NAME, "prefill")
    victim = sorted(before)[0]
    operator.stop()
    try:
        serving.kill_engine(victim)
        eventually(lambda: (serving.get("pod", victim) or {})["status"]["phase"] == "Failed")
    finally:
        operator.start()
    eventually(lambda: serving.pod_uids(NAME, "prefill").get(victim, before[victim]) != before[victim])
    serving.wait_ready(NAME)
    rebuilds = (serving.get("dd", NAME) or {})["status"]["rebuilds"]
    assert [r["failures"] for r in rebuilds if r["role"] == "prefill"] == [1]


def test_a_deleted_pod_takes_its_group_along(serving: kube.Namespace) -> None:
    before = serving.pod_uids(NAME, "decode")
    serving.run("delete", "pod", sorted(before)[0], "--wait=false")
    eventually(lambda: len(serving.pod_uids(NAME, "decode").items() - before.items()) == 2)
    serving.wait_ready(NAME)


def test_a_pod_whose_image_was_edited_is_replaced(serving: kube.Namespace) -> None:
    before = serving.pod_uids(NAME, "prefill")
    victim = sorted(before)[0]
    serving.run("set", "image", f"pod/{victim}", "engine=nowhere/none:1")
    eventually(lambda: serving.pod_uids(NAME, "prefill").get(victim, before[victim]) != before[victim])
    serving.wait_ready(NAME)


def test_edited_and_deleted_children_are_repaired_and_foreign_labels_kept(serving: kube.Namespace) -> None:
    serving.run("label", "service", f"{NAME}-decode-leaders", "team=x", f"{names.LABEL_ROLE}-")
    serving.run("delete", "service", f"{NAME}-prefill-leaders")
    patch = '{"spec": {"minAvailable": 0}}'
    serving.run("patch", "poddisruptionbudget", f"{NAME}-prefill-leaders", "--type=merge", "-p", patch)

    def is_repaired() -> bool:
        labels = (serving.get("service", f"{NAME}-decode-leaders") or {})["metadata"]["labels"]
        return (
            labels.get(names.LABEL_ROLE) == "decode"
            and labels.get("team") == "x"
            and serving.get("service", f"{NAME}-prefill-leaders") is not None
            and (serving.get("poddisruptionbudget", f"{NAME}-prefill-leaders") or {})["spec"]["minAvailable"] == 1
        )

    eventually(is_repaired)


def test_what_a_child_is_no_longer_to_have_is_taken_from_it(
    serving: kube.Namespace, deployment: Deployment, cluster: Cluster
) -> None:
    def limits() -> object:
        router = serving.get("deployment", names.router_name(NAME))
        return router and router["spec"]["template"]["spec"]["containers"][0].get("resources")

    router = {"replicas": 1, "image": cluster.operator_image}
    serving.apply(deployment({"spec.router": {**router, "resources": {"limits": {"memory": "1Gi"}}}}))
    eventually(lambda: limits() == {"limits": {"memory": "1Gi"}})
    serving.run("label", "deployment", names.router_name(NAME), "team=x")
    serving.apply(deployment({"spec.router": router}))
    eventually(lambda: limits() == {})
    assert serving.get("deployment", names.router_name(NAME))["metadata"]["labels"]["team"] == "x"


def test_conditions_of_others_survive(serving: kube.Namespace, deployment: Deployment) -> None:
    condition = {"type": "Approved", "status": "True", "reason": "Asked", "message": "", "lastTransitionTime": now()}
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": NAME}}
    body["status"] = {"conditions": [condition]}
    serving.run("apply", "--server-side", "--field-manager=other", "--subresource=status", "-f", "-", body=body)
    serving.apply(deployment({"spec.roles.0.replicas": 1}))
    serving.wait_ready(NAME)
    types = {c["type"] for c in (serving.get("dd", NAME) or {})["status"]["conditions"]}
    own = {names.VALID, names.AVAILABLE, names.PROGRESSING, names.READY, names.PROTECTED}
    assert types == own | {"Approved"}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def test_a_change_of_one_role_replaces_its_groups_one_by_one_and_no_other(
    serving: kube.Namespace, deployment: Deployment
) -> None:
    before = serving.pod_uids(NAME)
    serving.apply(deployment({"spec.roles.0.template": {**kube.OVERLAY, "labels": {"round": "2"}}}))
    eventually(lambda: serving.condition(NAME, names.PROGRESSING).get("reason") == names.REASON_ROLLING_OUT)
    eventually(lambda: set(serving.pod_uids(NAME, "prefill")) - set(before))
    old = set(serving.pod_uids(NAME, "prefill")) & set(before)
    serving.wait_ready(NAME)
    assert len(old) <= 1
    after = serving.pod_uids(NAME)
    assert not {n for n in after if "prefill" in n} & set(before)
    assert {n: u for n, u in after.items() if "decode" in n} == {n: u for n, u in before.items() if "decode" in n}
    eventually(lambda: len(serving.list("controllerrevisions", NAME)) == 3)  # the old template is kept, to go back to


def test_a_name_that_is_taken_is_left_alone(namespace: kube.Namespace, deployment: Deployment) -> None:
    name = names.role_service_name("taken", names.DECODE)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
    service["spec"] = {"selector": {"app": "mine"}, "ports": [{"port": 80}]}
    namespace.apply(service)
    namespace.apply(deployment(name="taken"))
    try:
        eventually(lambda: namespace.condition("taken", names.READY).get("reason") == names.REASON_REFUSED)
        assert "belongs to someone else" in namespace.condition("taken", names.READY)["message"]
        assert (namespace.get("service", name) or {})["spec"]["selector"] == {"app": "mine"}
    finally:
        namespace.run("delete", "dd", "taken")
    eventually(lambda: not namespace.list("pods", "taken"))
    assert namespace.get("service", name)


def test_a_deleted_deployment_leaves_nothing(serving: kube.Namespace) -> None:
    serving.run("delete", "dd", NAME)
    eventually(lambda: not serving.list(KINDS, NAME))
