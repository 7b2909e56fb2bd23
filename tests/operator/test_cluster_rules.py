"""The table of rules once more, against a real API server; and the CRD itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.rule_cases import CASES, FIELD_CASES, Case, resource

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[kube.Namespace]:
    name = f"operator-rules-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def refusal(namespace: kube.Namespace, case: Case) -> str:
    """What the API server says against a case; empty if nothing."""
    try:
        namespace.run("apply", "--server-side", "--dry-run=server", "-f", "-", body=case.body)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES + FIELD_CASES, ids=lambda case: case.name)
def test_the_api_server_accepts_or_refuses(namespace: kube.Namespace, case: Case) -> None:
    if case.before is not None:
        # No pods: the operator is at work in this namespace too.
        namespace.apply(resource({**case.before, "spec.roles.0.replicas": 0, "spec.roles.1.replicas": 0}))
    try:
        said = refusal(namespace, case)
    finally:
        if case.before is not None:
            namespace.run("delete", "dd", "--all")
    if case.message is None:
        assert said == ""
    else:
        assert case.message in said


@pytest.mark.parametrize("path", ["dd.spec", "dd.spec.roles", "dd.spec.roles.parallelism", "dd.status.conditions"])
def test_explain_describes_every_field(namespace: kube.Namespace, path: str) -> None:
    text = namespace.run("explain", path)
    assert "<no description>" not in text
    assert "DESCRIPTION" in text
