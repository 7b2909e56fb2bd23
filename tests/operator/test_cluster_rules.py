"""The table of rules once more, against a real API server; and the CRD itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator import kube
from tests.operator.rule_cases import CASES, FIELD_CASES, Case, resource

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="module")
def namespace() -> Iterator[kube.Namespace]:
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("end-to-end tests need KUBECONFIG")
    kube.run("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    kube.run("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
    name = f"headrace-rules-{os.getpid()}"
    kube.run("create", "namespace", name)
    yield kube.Namespace(name)
    kube.run("delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("case", CASES + FIELD_CASES, ids=lambda case: case.name)
def test_the_api_server_accepts_or_refuses(namespace: kube.Namespace, case: Case) -> None:
    if case.before is not None:
        namespace.apply(resource(case.before))
    try:
        done = namespace.run("apply", "--server-side", "--dry-run=server", "-f", "-", body=case.body, check=False)
    finally:
        if case.before is not None:
            namespace.run("delete", "dd", "--all")
    if case.message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert case.message in done.stderr


@pytest.mark.parametrize("path", ["dd.spec", "dd.spec.roles", "dd.spec.roles.parallelism", "dd.status.conditions"])
def test_explain_describes_every_field(namespace: kube.Namespace, path: str) -> None:
    text = namespace.run("explain", path).stdout
    assert "<no description>" not in text
    assert "DESCRIPTION" in text
