"""Which file may touch what: the API server, kopf, the clock and the environment each have their place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace_operator

PACKAGE = Path(headrace_operator.__file__).parent
# Modules that decide: data in, data out.
PURE = [
    "cluster_errors",
    "api",
    "api_engine",
    "api_failure",
    "api_pods",
    "api_scaling",
    "api_autoscale",
    "autoscale",
    "balance",
    "pressure",
    "signals",
    "api_placement",
    "quantities",
    "scheduling",
    "capacity",
    "placement",
    "shortage",
    "turns",
    "admission",
    "census",
    "ledger",
    "api_status",
    "rules",
    "names",
    "kinds",
    "field_owners",
    "memory",
    "groups",
    "node_loss",
    "restarts",
    "retry",
    "rollout",
    "scaling",
    "api_rollout",
    "leeway",
    "pairing",
    "planning",
    "plans",
    "children",
    "history",
    "forecast",
    "forecast_nodes",
    "forecast_room",
    "forecast_text",
    "outlook",
    "progress",
    "slots",
    "upkeep",
    "vanished",
    "revision",
    "disruptions",
    "drain",
    "drift",
    "decide",
    "status",
    "troubles",
    "observe",
    "picture",
    "preview",
    "problems",
    "report",
    "events",
    "figures",
    "expectations",
    "election",
    "repairs",
    "render/nodes",
    "render/objects",
    "render/overlay",
    "render/pods",
    "render/router",
    "render/scaler",
    "render/services",
    "render/site",
    "render/runtimes/headrace",
]
IMPURE = {"time", "os", "random", "uuid", "asyncio", "kopf", "kubernetes", "aiohttp"}


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def importers(package: str) -> set[str]:
    return {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if package in imports(path)}


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("kubernetes", {"cluster.py", "connection.py"}),
        ("kopf", {"handlers.py", "store.py", "serve.py"}),
        ("prometheus_client", {"metrics.py", "serve.py"}),
        ("aiohttp", {"cluster.py", "engines.py", "serve.py", "local/up.py"}),
        ("subprocess", set()),
    ],
)
def test_each_outside_thing_has_its_file(package: str, files: set[str]) -> None:
    assert importers(package) == files


@pytest.mark.parametrize("module", PURE)
def test_modules_that_decide_have_no_clock_no_client_and_no_environment(module: str) -> None:
    assert not imports(PACKAGE / f"{module}.py") & IMPURE


@pytest.mark.parametrize("module", ["headrace_operator.main", "headrace_operator.cli"])
def test_the_operator_loads_no_tensors(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'nixl', 'headrace_engine'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("module", ["headrace_operator.main", "headrace_operator.cli", "headrace_operator.manifests"])
def test_command_lines_start_without_a_clusters_client(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'kopf', 'kubernetes', 'aiohttp'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_folder_is_never_a_package() -> None:
    # As a package it would shadow the standard library's `operator` for whoever runs Python from the root.
    assert not (PACKAGE.parent / "__init__.py").exists()
