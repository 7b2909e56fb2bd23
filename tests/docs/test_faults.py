"""The list of faults: every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from tests.docs.markdown import ROOT, quoted

DOCUMENT = ROOT / "docs/faults.md"
NAMED = sorted({word for word in quoted(DOCUMENT) if "::" in word})


@functools.cache
def functions_of(path: str) -> set[str]:
    """Names of a file's test functions. Files without a folder are the operator's."""
    tree = ast.parse((ROOT / (path if "/" in path else f"tests/operator/{path}")).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("named", NAMED)
def test_every_test_that_shows_a_fault_exists(named: str) -> None:
    path, _, function = named.partition("::")
    assert function in functions_of(path)


def test_every_fault_names_a_test() -> None:
    faults = [text for text in DOCUMENT.read_text().split("\n\n") if text.startswith("**")]
    assert len(faults) > 30
    assert [fault.splitlines()[0] for fault in faults if not re.search(r"`[\w/]+\.py::test_\w+`", fault)] == []
