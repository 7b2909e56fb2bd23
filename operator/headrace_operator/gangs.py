"""Gangs: groups whose pods somebody's scheduler binds all together or not at all. Pure.

A group has a gang per life: made again, it gets a new one, so that no scheduler mistakes new pods for members of a gang
whose pods it has bound before. Which gang a group is in is written on its pods, so a change of the field reaches groups
that are made from then on, and a pod that is made beside others joins theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator import names
from headrace_operator.api_placement import Placement
from headrace_operator.groups import GroupKey
from headrace_operator.render.objects import Owner
from headrace_operator.revision import content_hash

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Gang:
    """`kind`: whose it is, a value of placement.gang."""

    kind: str
    name: str


def new_gang(placement: Placement | None, owner: Owner, key: GroupKey, num_pods: int, now: float) -> Gang | None:
    """The gang of a group that is made now. The scheduler has no use for a gang of one pod; queues count every pod."""
    if placement is None or not joins(placement, num_pods):
        return None
    life = content_hash([owner.uid, key.role, key.revision, key.index, now])[:8]
    return Gang(placement.gang, names.gang_name(owner.name, key.role, key.index, life))


def joins(placement: Placement, num_pods: int) -> bool:
    """Whether groups of so many pods are gangs."""
    return placement.gang != "None" and (num_pods > 1 or placement.gang != names.GANG_NATIVE)


def is_ignored(pod: Body) -> bool:
    """Whether a pod that is in a gang of Kueue's was made without Kueue taking it."""
    labels = pod["metadata"].get("labels") or {}
    return names.LABEL_KUEUE_GROUP in labels and names.LABEL_KUEUE_MANAGED not in labels


def is_held(pod: Body) -> bool:
    """Whether a pod was removed by force, as from a silent node, and only Kueue's finalizer keeps it.

    Kueue takes it off once all pods of the group have ended, or when another pod comes in the place of this one. This
    one never ends, and the one in its place is to have its name. (A pod that never had a node has ended when
    Kubernetes' garbage collection finds it.)
    """
    metadata = pod["metadata"]
    if pod["kind"] != "Pod" or "deletionTimestamp" not in metadata:
        return False
    has_ended = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    is_forced = metadata.get("deletionGracePeriodSeconds") == 0 and bool(pod["spec"].get("nodeName"))
    return is_forced and not has_ended and names.FINALIZER_KUEUE in (metadata.get("finalizers") or ())


def others_finalizers(pod: Body) -> list[str]:
    """A pod's finalizers without Kueue's."""
    return [name for name in pod["metadata"].get("finalizers") or () if name != names.FINALIZER_KUEUE]


def gang_of(pods: Iterable[Body]) -> Gang | None:
    """The gang that these pods, all of one group, are in."""
    for pod in pods:
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        native = (spec.get("workloadRef") or {}).get("name")
        volcano = (metadata.get("annotations") or {}).get(names.ANNOTATION_VOLCANO_GROUP)
        kueue = (metadata.get("labels") or {}).get(names.LABEL_KUEUE_GROUP)
        for kind, name in ((names.GANG_NATIVE, native), (names.GANG_VOLCANO, volcano), (names.GANG_KUEUE, kueue)):
            if name:
                return Gang(kind, name)
    return None
