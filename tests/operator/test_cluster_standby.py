"""Two operators on a real cluster: one works, the other takes over; and neither minds an API server that is away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.cluster.onemachine.daemons import Daemons
from e2e.cluster.onemachine.layout import PROJECT_ROOT, Layout, default_cache
from e2e.support.cluster import Cluster
from e2e.support.headrace import OPERATOR_NAMESPACE
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import names

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "kept"
LEASE = "headrace"
# Longer than the lease, and than what kopf would try on for by itself (54 s).
OUTAGE_SECONDS = 60


@pytest.fixture(scope="module")
def operators(cluster: Cluster) -> Iterator[kube.Namespace]:
    """The namespace of two operators."""
    namespace = kube.Namespace(cluster, OPERATOR_NAMESPACE)
    (name,) = namespace.run("get", "deployment", "-l", kube.OPERATOR_SELECTOR, "-o", "name").split()
    namespace.run("scale", name, "--replicas=2")
    namespace.run("rollout", "status", name, "--timeout=80s")
    yield namespace
    namespace.run("scale", name, "--replicas=1")
    namespace.run("rollout", "status", name, "--timeout=80s")


@pytest.fixture(scope="module")
def serving(cluster: Cluster) -> Iterator[kube.Namespace]:
    """A ready deployment of stand-ins, for an operator to look after."""
    name = f"operator-standby-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    namespace = kube.Namespace(cluster, name)
    template = kube.OVERLAY
    changes = {"spec.roles.0.template": template, "spec.roles.1.template": template, "spec.router": {"replicas": 0}}
    engine = {"image": cluster.operator_image}
    namespace.apply(resource({"metadata.name": NAME, "spec.engine": engine, "spec.drainTimeoutSeconds": 2, **changes}))
    namespace.wait_ready(NAME)
    yield namespace
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def pods(operators: kube.Namespace) -> dict[str, dict[str, Any]]:
    listed = operators.cluster.list("pods", kube.OPERATOR_SELECTOR, OPERATOR_NAMESPACE)
    return {pod["metadata"]["name"]: pod for pod in listed if "deletionTimestamp" not in pod["metadata"]}


def holder(operators: kube.Namespace) -> str:
    """The pod that holds the lease; empty if nobody does."""
    return str((operators.get("lease", LEASE) or {})["spec"].get("holderIdentity") or "").partition("_")[0]


def leaders(operators: kube.Namespace) -> list[str]:
    """Pods that say of themselves that they work."""
    found = []
    for name in pods(operators):
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{name}:{names.PORT_OPERATOR}/proxy/metrics"
        if "\nheadrace_operator_is_leader 1.0" in operators.run("get", "--raw", path):
            found.append(name)
    return found


def assert_something_is_repaired(serving: kube.Namespace) -> None:
    """Only an operator that watches and may write brings a deleted Service back."""
    service = names.role_service_name(NAME, names.DECODE)
    before = (serving.get("service", service) or {})["metadata"]["uid"]
    serving.run("delete", "service", service)
    eventually(lambda: (serving.get("service", service) or {"metadata": {"uid": before}})["metadata"]["uid"] != before)


def test_one_works_and_the_other_stands_by_ready(operators: kube.Namespace, serving: kube.Namespace) -> None:
    assert len(pods(operators)) == 2
    assert leaders(operators) == [holder(operators)]
    assert_something_is_repaired(serving)


@pytest.mark.long
def test_the_other_takes_over_when_the_one_that_works_dies(operators: kube.Namespace, serving: kube.Namespace) -> None:
    first, before = holder(operators), serving.pod_uids(NAME)
    operators.run("delete", "pod", first, "--force", "--grace-period=0")
    eventually(lambda: holder(operators) not in ("", first))
    assert_something_is_repaired(serving)
    assert leaders(operators) == [holder(operators)]
    assert serving.pod_uids(NAME) == before


@pytest.mark.long
def test_nothing_restarts_while_the_api_server_is_away(
    cluster: Cluster, operators: kube.Namespace, serving: kube.Namespace
) -> None:
    if not cluster.is_one_machine:
        pytest.skip("only our own cluster's API server may be stopped")
    eventually(lambda: len(pods(operators)) == 2)
    before, engines = restarts(operators), serving.pod_uids(NAME)
    working = holder(operators)
    layout = Layout(default_cache())
    Daemons(layout.run, layout.logs).stop("kube-apiserver")
    try:
        time.sleep(OUTAGE_SECONDS)
    finally:
        command = [sys.executable, str(PROJECT_ROOT / "e2e/cluster/cluster.py"), "up"]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    assert_something_is_repaired(serving)
    assert restarts(operators) == before
    assert holder(operators) == working
    serving.wait_ready(NAME)
    assert serving.pod_uids(NAME) == engines, serving.run("get", "events", "--sort-by=.lastTimestamp")


def restarts(operators: kube.Namespace) -> dict[str, int]:
    """Restarts of each operator's container by pod."""
    return {name: pod["status"]["containerStatuses"][0]["restartCount"] for name, pod in pods(operators).items()}
