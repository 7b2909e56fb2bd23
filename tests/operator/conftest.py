"""The cluster that end-to-end tests run on, and a stand-in for the one that commands talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return headrace.installed()


@pytest.fixture
def connect_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has commands find this object where the API server's client would be, whatever context they name."""

    def replace(server: Any) -> None:
        @asynccontextmanager
        async def connect(context: str | None) -> AsyncIterator[Any]:
            yield server

        monkeypatch.setattr("headrace_operator.connection.connect", connect)

    return replace
