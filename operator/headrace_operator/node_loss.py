"""Which pods are lost with their nodes. Pure: what the API server says of nodes in, marked pods out.

A pod on a node that has gone silent stays, Running or Terminating, until someone removes it by force: its kubelet is
not there to say that it has ended. The node is asked for only while one of its pods looks as if (`Pod.is_suspect`).
A node that comes back ends what was removed meanwhile; until then two groups may run, which do not know each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_operator.groups import Pod
from headrace_operator.observe import Observed
from headrace_operator.times import epoch_seconds

GONE = 0.0  # since when a node is silent that was removed from the cluster: since ever


def suspect_nodes(observed: Observed) -> list[str]:
    """Nodes worth asking for."""
    return sorted({pod.node for pods in observed.groups.values() for pod in pods if pod.is_suspect and pod.node})


def silent_since(node: Mapping[str, Any] | None) -> float | None:
    """Epoch seconds since when a node has not been ready; None if it is, `GONE` if it is not there any more (None)."""
    if node is None:
        return GONE
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            return epoch_seconds(condition["lastTransitionTime"])
    return None


def with_lost_pods(observed: Observed, silent: Mapping[str, float], loss_seconds: float, now: float) -> Observed:
    """The same with the pods marked whose nodes are silent. `silent`: since when, by node."""
    if not silent:
        return observed
    groups = {key: tuple(marked(p, silent, loss_seconds, now) for p in pods) for key, pods in observed.groups.items()}
    return replace(observed, groups=groups)


def marked(pod: Pod, silent: Mapping[str, float], loss_seconds: float, now: float) -> Pod:
    """The pod with the time at which it counts as lost, if its node is silent."""
    if not pod.is_suspect or pod.node not in silent:
        return pod
    lost_at = silent[pod.node] + loss_seconds
    return replace(pod, lost_at=lost_at, is_lost=now >= lost_at)


def only_lost(pods: Sequence[Pod]) -> bool:
    """Whether losing its node is all that happened to the group."""
    return any(pod.is_lost for pod in pods) and not any(p.is_finished or p.is_edited or p.is_restarted for p in pods)


def lost_message(pods: Sequence[Pod]) -> str:
    """Names the nodes that took pods along; empty if none did."""
    lost = [pod for pod in pods if pod.is_lost]
    nodes = sorted({pod.node for pod in lost})
    if not lost:
        return ""
    what = f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"
    return f"{what} not answer (pod {lost[0].name}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''})"
