"""Keeping a group's pods off nodes where it failed again and again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WEIGHT = 100  # the most that one preference can have


def avoiding(pod: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The pod with a preference for any node but these, beside what its template says.

    A preference, not a demand: where no other node has room the group is tried there once more, and given up by its
    restart budget, with the node's name, rather than left waiting for a node that will never come.
    """
    if not nodes:
        return pod
    # By name: the label kubernetes.io/hostname may differ from it. A field takes one value, so one entry per node.
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    preference = {"weight": _WEIGHT, "preference": {"matchFields": others}}
    affinity = pod["spec"].get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    preferred = [*(node_affinity.get(key) or ()), preference]
    return {**pod, "spec": {**pod["spec"], "affinity": {**affinity, "nodeAffinity": {**node_affinity, key: preferred}}}}
