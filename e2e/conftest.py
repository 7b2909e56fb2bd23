"""Scenarios on a real cluster. They need only a KUBECONFIG and image names (see e2e/support/cluster.py).

Every scenario is told as a user would live it: apply, ask, break something, look again. Each makes its own namespace,
so that scenarios cannot see each other, and deletes it at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.support import busy, headrace
from e2e.support.cluster import Cluster
from e2e.support.traffic import Question


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue  # pytest shows every item of the session to every conftest
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(900))  # waits have their own, shorter deadlines and say more


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return headrace.installed()


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return busy.known_questions()


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the module's own; what an interrupted run left of it is removed first."""
    name = "e2e-" + request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_").replace("_", "-")
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=true", "--timeout=120s",
                    timeout_seconds=150)  # fmt: skip
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
