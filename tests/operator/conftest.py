"""The cluster that end-to-end tests run on."""

from __future__ import annotations

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return headrace.installed()
