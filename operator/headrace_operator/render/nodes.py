"""What a pod made now says about nodes, beside its template: none of it is part of a revision. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_operator.placement import Pins

_WEIGHT = 100  # the most that one preference can have
_SILENT = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def leaving_after(pod: dict[str, Any], node_loss_seconds: int) -> dict[str, Any]:
    """The pod with the wish to be taken off a node that has been silent for so long, unless its template says more.

    Kubernetes acts on it by itself, also while the operator is down.
    """
    given: list[Mapping[str, Any]] = list(pod["spec"].get("tolerations") or ())
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": node_loss_seconds}
        for key in _SILENT
        if not any(_tolerates(toleration, key) for toleration in given)
    ]
    return {**pod, "spec": {**pod["spec"], "tolerations": [*given, *added]}} if added else pod


def stays_seconds(pod: Mapping[str, Any]) -> float:
    """How long a pod that was made so stays on a node that is silent; infinite if its template says so."""
    tolerations = [t for t in pod["spec"].get("tolerations") or () if _tolerates(t, _SILENT[1])]
    return min((float(t.get("tolerationSeconds", "inf")) for t in tolerations), default=0.0)


def _tolerates(toleration: Mapping[str, Any], key: str) -> bool:
    return toleration.get("key") in (None, "", key) and toleration.get("effect") in (None, "", "NoExecute")


def pinned(pod: dict[str, Any], pins: Pins) -> dict[str, Any]:
    """The pod with the demand, or the wish, for nodes with the labels that were chosen for its group.

    A demand is a nodeSelector, because that holds whatever affinity the template has: terms of an affinity are
    alternatives. Where the template's own nodeSelector names the label the value is the same, since only nodes that
    the template allows were chosen from.
    """
    if not pins.labels:
        return pod
    if pins.is_required:
        selector = {**(pod["spec"].get("nodeSelector") or {}), **dict(pins.labels)}
        return {**pod, "spec": {**pod["spec"], "nodeSelector": selector}}
    chosen = [{"key": label, "operator": "In", "values": [value]} for label, value in pins.labels]
    return _preferring(pod, {"matchExpressions": chosen})


def avoiding(pod: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The pod with a preference for any node but these, on which its group failed again and again.

    A preference, not a demand: where no other node has room the group is tried there once more, and given up by its
    restart budget, with the node's name, rather than left waiting for a node that will never come.
    """
    if not nodes:
        return pod
    # By name: the label kubernetes.io/hostname may differ from it. A field takes one value, so one entry per node.
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return _preferring(pod, {"matchFields": others})


def _preferring(pod: dict[str, Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with one more preference, beside what its template says."""
    affinity = pod["spec"].get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    preferred = [*(node_affinity.get(key) or ()), {"weight": _WEIGHT, "preference": nodes}]
    return {**pod, "spec": {**pod["spec"], "affinity": {**affinity, "nodeAffinity": {**node_affinity, key: preferred}}}}
