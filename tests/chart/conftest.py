"""Rendering the chart with helm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/headrace"

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> str:
    """Path of helm: $HELM, or the one that the development cluster brings along."""
    if path := os.environ.get("HELM"):
        return path
    found = subprocess.run(
        [sys.executable, str(ROOT / "e2e/cluster/cluster.py"), "helm-path"], capture_output=True, text=True, timeout=240
    )
    if found.returncode:
        pytest.fail(f"helm is needed: set HELM to its path. cluster.py helm-path said: {found.stderr.strip()}")
    return found.stdout.strip()


@pytest.fixture
def template(helm: str, tmp_path: Path) -> Callable[[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Run `helm template` with the given values."""

    def run(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values))
        command = [helm, "template", "headrace", str(CHART), "--namespace", "system", "--values", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def render(template: Callable[[dict[str, Any]], subprocess.CompletedProcess[str]]) -> Render:
    """The objects of the chart with the given values."""

    def run(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        result = template(values or {})
        assert result.returncode == 0, result.stderr
        return [body for body in yaml.safe_load_all(result.stdout) if body]

    return run
