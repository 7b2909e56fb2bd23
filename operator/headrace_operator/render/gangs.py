"""What makes pods a gang: marks on the pods, and for some schedulers an object beside them. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.gangs import Gang
from headrace_operator.groups import GroupKey
from headrace_operator.render.companions import group_labels
from headrace_operator.render.objects import Owner, metadata, stamped


def ganged(pod: dict[str, Any], gang: Gang, num_pods: int, queue: str | None) -> dict[str, Any]:
    """The pod as one of the `num_pods` of its gang. Scheduling gates, and a scheduler, that its template names stay."""
    meta, spec = pod["metadata"], pod["spec"]
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    if gang.kind == names.GANG_NATIVE:
        spec = {**spec, "workloadRef": {"name": gang.name, "podGroup": names.WORKLOAD_POD_GROUP}}
    elif gang.kind == names.GANG_VOLCANO:
        annotations = {names.ANNOTATION_VOLCANO_GROUP: gang.name}
        spec = {"schedulerName": names.VOLCANO_SCHEDULER, **spec}
    else:
        labels = {names.LABEL_KUEUE_GROUP: gang.name, names.LABEL_KUEUE_QUEUE: queue or ""}
        # Kueue would keep an ended pod until one that replaces it comes; ours all go before any comes.
        annotations = {names.ANNOTATION_KUEUE_COUNT: str(num_pods), names.ANNOTATION_KUEUE_RETRIABLE: "false"}
    meta = {**meta, "labels": {**meta["labels"], **labels}, "annotations": {**meta["annotations"], **annotations}}
    return {**pod, "metadata": meta, "spec": spec}


def gang_object(owner: Owner, key: GroupKey, gang: Gang, num_pods: int, queue: str | None) -> dict[str, Any] | None:
    """The object that a scheduler reads of the gang; None: it reads the pods alone."""
    meta = metadata(owner, gang.name, group_labels(owner, key))
    if gang.kind == names.GANG_NATIVE:
        groups = [{"name": names.WORKLOAD_POD_GROUP, "policy": {"gang": {"minCount": num_pods}}}]
        return stamped(
            {
                "apiVersion": "scheduling.k8s.io/v1alpha1",
                "kind": names.WORKLOAD_KIND,
                "metadata": meta,
                "spec": {"podGroups": groups},
            }
        )
    if gang.kind == names.GANG_VOLCANO:
        spec = {"minMember": num_pods, **({"queue": queue} if queue else {})}
        return stamped(
            {
                "apiVersion": "scheduling.volcano.sh/v1beta1",
                "kind": names.VOLCANO_KIND,
                "metadata": meta,
                "spec": spec,
            }
        )
    return None
