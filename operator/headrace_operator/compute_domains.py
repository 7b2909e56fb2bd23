"""What a group's ComputeDomain says of its pods. Pure: API objects in, troubles out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace_operator import names
from headrace_operator.groups import Pod, Trouble

Body = Mapping[str, Any]


def waiting_for_domain(pod: Pod, domain: Body | None) -> Pod:
    """The pod with its domain as the reason why its containers do not start, where that is so: it has a node, and the
    driver lets it go on once the domain's daemon on that node is ready."""
    if domain is None:
        return pod
    status = domain.get("status") or {}
    is_starting = pod.trouble is not None and pod.trouble.reason == names.REASON_STARTING
    if status.get("status") == "Ready" or not (pod.node and pod.phase == "Pending" and is_starting):
        return pod
    nodes = status.get("nodes") or ()
    num_ready = sum(node.get("status") == "Ready" for node in nodes)
    message = (
        f"pod {pod.name} waits for ComputeDomain {domain['metadata']['name']}: {num_ready} of the {len(nodes)} nodes "
        "that joined it are ready"
    )
    return replace(pod, trouble=Trouble(names.REASON_WAITING_FOR_COMPUTE_DOMAIN, message))
