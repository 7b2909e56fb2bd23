"""Pods on their way out that no group has any more, on nodes that do not end them. Pure.

Garbage collection deletes the pods of a deployment that went or is going. Those on a silent node stay Terminating
until someone removes them by force: the deletion of their deployment, if it waits for them, never ends, and a
successor of the same name finds the names of its pods taken. (`upkeep.py` does the same for pods of groups.) A pod says
itself how long it stays on a silent node (`render/nodes.py`): its deployment may not be there any more to say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator.groups import Pod
from headrace_operator.node_loss import marked
from headrace_operator.observe import controller_uid, is_of_name, place_of
from headrace_operator.plans import Deletion
from headrace_operator.pod_facts import pod_facts
from headrace_operator.render.nodes import stays_seconds

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Straggler:
    """A pod, and how many seconds it stays on a node that is silent."""

    pod: Pod
    stays_seconds: float


def stragglers(deployment: str, uid: str, objects: Iterable[Body]) -> list[Straggler]:
    """Pods that are being deleted, have an owner of this name, and are in no group of the deployment with this uid
    (empty: none is there to stay)."""
    return [
        Straggler(pod_facts(body, 0), stays_seconds(body))
        for body in objects
        if body["kind"] == "Pod"
        and "deletionTimestamp" in body["metadata"]
        and is_of_name(deployment, body)
        and not (controller_uid(body) == uid and place_of(body))
    ]


def suspects(found: Iterable[Straggler]) -> list[str]:
    """Nodes worth asking for."""
    return sorted({straggler.pod.node for straggler in found if straggler.pod.is_suspect and straggler.pod.node})


def overdue(found: Iterable[Straggler], silent: Mapping[str, float], now: float) -> tuple[list[Deletion], float | None]:
    """Those that are to be removed by force, and how long until the next one is. `silent`: as of `silent_since`."""
    pods = [marked(straggler.pod, silent, straggler.stays_seconds, now) for straggler in found]
    gone = [Deletion(pod.name, pod.uid, 0) for pod in pods if pod.gone_at is not None and pod.gone_at <= now]
    waits = [pod.gone_at - now for pod in pods if pod.gone_at is not None and pod.gone_at > now]
    return gone, min(waits, default=None)
