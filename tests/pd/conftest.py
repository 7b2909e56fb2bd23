"""Engines and the reference that several modules compare with: started once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.pd.engines import Engine, running
from tests.pd.reference import Reference


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    with Reference.open() as reference:
        yield reference


@pytest.fixture(scope="session")
def unified() -> Iterator[Engine]:
    engine = Engine("--role", "unified")
    with running(engine):
        yield engine
