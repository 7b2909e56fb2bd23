"""Pods on their way out that no group has any more, on nodes that do not end them. Pure.

Garbage collection deletes the pods of a deployment that went or is going. Those on a silent node stay Terminating
until someone removes them by force: the deletion of their deployment, if it waits for them, never ends, and a
successor of the same name finds the names of its pods taken. (`upkeep.py` does the same for pods of groups.) A pod says
itself how long it stays on a silent node (`render/nodes.py`): its deployment may not be there any more to say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operator.groups import Pod
from headrace_operator.node_loss import marked
from headrace_operator.observe import controller_uid, is_of_name, place_of
from headrace_operator.plans import Deletion
from headrace_operator.pod_facts import pod_facts
from headrace_operator.render.nodes import stays_seconds
from headrace_operator.times import epoch_seconds

Body = Mapping[str, Any]

# Pods that were told to go mostly do, also on a busy machine: nobody need ask for their nodes.
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Straggler:
    """A pod, and from when on its node is worth asking for. What is known of it is looked up only then: mostly there
    are many, and soon none."""

    body: Body
    suspect_at: float

    @property
    def pod(self) -> Pod:
        return pod_facts(self.body, 0)


def stragglers(deployment: str, uid: str, objects: Iterable[Body]) -> list[Straggler]:
    """Pods that are being deleted, have an owner of this name, and are in no group of the deployment with this uid
    (empty: none is there to stay)."""
    return [
        Straggler(body, _deleted_at(body["metadata"]) + PATIENCE_SECONDS)
        for body in objects
        if body["kind"] == "Pod"
        and "deletionTimestamp" in body["metadata"]
        and is_of_name(deployment, body)
        and not (controller_uid(body) == uid and place_of(body))
    ]


def suspects(found: Iterable[Straggler], now: float) -> list[str]:
    """Nodes worth asking for."""
    pods = [straggler.pod for straggler in found if now >= straggler.suspect_at]
    return sorted({pod.node for pod in pods if pod.is_suspect and pod.node})


def overdue(found: Sequence[Straggler], silent: Mapping[str, float], now: float) -> tuple[list[Deletion], float | None]:
    """Those that are to be removed by force, and how long until there may be more. `silent`: as of `silent_since`."""
    late = [straggler for straggler in found if now >= straggler.suspect_at]
    pods = [marked(straggler.pod, silent, stays_seconds(straggler.body), now) for straggler in late]
    gone = [Deletion(pod.name, pod.uid, 0) for pod in pods if pod.gone_at is not None and pod.gone_at <= now]
    times = [pod.gone_at for pod in pods if pod.gone_at is not None] + [straggler.suspect_at for straggler in found]
    return gone, min((time - now for time in times if time > now), default=None)


def _deleted_at(metadata: Body) -> float:
    """When a pod that is being deleted was told to go; its deletionTimestamp is when it should be gone."""
    return epoch_seconds(metadata["deletionTimestamp"]) - float(metadata.get("deletionGracePeriodSeconds") or 0)
