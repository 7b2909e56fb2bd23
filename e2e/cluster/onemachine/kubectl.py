"""Talking to the cluster with its own kubectl."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from .console import ClusterError, run


class Kubectl:
    """kubectl with one kubeconfig."""

    def __init__(self, binary: Path, kubeconfig: Path) -> None:
        self._command = [binary, f"--kubeconfig={kubeconfig}"]

    def __call__(self, *arguments: str, what: str, input_text: str | None = None, timeout_seconds: float = 60) -> str:
        return run([*self._command, *arguments], what, input_text=input_text, timeout_seconds=timeout_seconds)

    def is_ready(self) -> bool:
        """Whether the API server answers and all its checks pass."""
        try:
            return self("get", "--raw", "/readyz", "--request-timeout=3s", what="readiness", timeout_seconds=10) == "ok"
        except ClusterError:
            return False

    def apply(self, objects: list[dict[str, Any]], what: str) -> None:
        """Server-side apply, as the field manager `headrace-cluster`."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        arguments = ("apply", "--server-side", "--force-conflicts", "--field-manager=headrace-cluster", "-f", "-")
        self(*arguments, what=what, input_text=content, timeout_seconds=120)

    def nodes(self, selector: str = "") -> list[dict[str, Any]]:
        raw = self("get", "nodes", "-o", "json", f"--selector={selector}", what="reading nodes")
        items = json.loads(raw)["items"]
        assert isinstance(items, list)
        return items


def is_node_ready(node: dict[str, Any], since: float = 0.0) -> bool:
    """Whether the node is Ready, by a report of its kubelet from `since` (seconds of Unix time) or later.

    For a while after its death a node still counts as Ready: nobody has missed it yet.
    """
    conditions = node.get("status", {}).get("conditions", [])
    return any(
        c["type"] == "Ready"
        and c["status"] == "True"
        and datetime.fromisoformat(c["lastHeartbeatTime"]).timestamp() >= math.floor(since)
        for c in conditions
    )
