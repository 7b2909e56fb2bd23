"""Pods that no watch shows any more though their group had started. Pure.

Either they are gone, and their group is broken; or someone has taken away the label that they are watched by. Only the
API server can tell.
"""

from __future__ import annotations

from typing import Any

from headrace_operator.observe import Observed
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import PodIdentity


def vanished(owner: Owner, observed: Observed) -> list[dict[str, Any]]:
    """What each of them is to have beside its spec: names, labels, annotations."""
    found = []
    for key, pods in observed.groups.items():
        template = observed.templates.get((key.role, key.revision))
        if template is None or len(pods) == template.parallelism.num_pods:
            continue
        if any(pod.is_terminating or pod.is_finished for pod in pods) or all(pod.phase == "Pending" for pod in pods):
            continue  # the group goes, or has not started: nothing hangs on a pod that is missing
        identity = PodIdentity(owner, key.role, key.revision, template)
        missing = set(range(template.parallelism.num_pods)) - {pod.index for pod in pods}
        found += [identity.of(key.index, index) for index in sorted(missing)]
    return found
