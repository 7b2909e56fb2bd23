"""PodDisruptionBudgets: how many pods evictions must leave. `disruptions.py` says why so many. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.render.objects import Owner, metadata, stamped


def role_budget(owner: Owner, role: str, min_available: int) -> dict[str, Any]:
    """Evictions must leave so many of the role's engine pods. A count, since a share needs an owner with /scale."""
    selector = {names.LABEL_DEPLOYMENT: owner.name, names.LABEL_ROLE: role}
    name, labels = names.budget_name(owner.name, role), names.role_labels(owner.name, role)
    return _budget(owner, name, labels, selector, {"minAvailable": min_available})


def router_budget(owner: Owner, selector: Mapping[str, str]) -> dict[str, Any]:
    """Evictions take one router pod at a time, and the next one once another is ready in its place."""
    labels = names.labels(owner.name, names.ROUTER)
    return _budget(owner, names.router_name(owner.name), labels, selector, {"maxUnavailable": 1})


def _budget(
    owner: Owner, name: str, labels: Mapping[str, str], selector: Mapping[str, str], limit: Mapping[str, int]
) -> dict[str, Any]:
    spec = {
        **limit,
        "selector": {"matchLabels": dict(selector)},
        # A pod that serves nobody is in nobody's way.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    body = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(owner, name, labels),
        "spec": spec,
    }
    return stamped(body)
