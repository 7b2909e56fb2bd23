"""The cluster that end-to-end tests run on."""

from __future__ import annotations

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster, discover


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster with the chart installed from this tree."""
    found = discover()
    headrace.install(found)
    return found
