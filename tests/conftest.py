"""Options that every area's tests share."""

from __future__ import annotations

import os

import pytest

# Triton settles when it is first imported, by whatever test, whether kernels are compiled or run by its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files instead of comparing")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
