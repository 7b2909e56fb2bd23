"""Objects that stand beside the pods of one group. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.groups import GroupKey
from headrace_operator.render.objects import Owner, metadata, stamped


def compute_domain(owner: Owner, key: GroupKey) -> dict[str, Any]:
    """The ComputeDomain of a group: the nodes that its pods land on share GPU memory.

    The driver makes the claim template that is named here, and the domain gets ready once the pods that claim its
    channel are on their nodes; so pods do not wait for it. `numNodes` is deprecated: 0 holds no pod back.
    """
    name = names.group_name(owner.name, key.role, key.revision, key.index)
    body = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": names.COMPUTE_DOMAIN_KIND,
        "metadata": metadata(owner, name, group_labels(owner, key)),
        "spec": {
            "numNodes": 0,
            "channel": {"resourceClaimTemplate": {"name": name}, "allocationMode": "Single"},
        },
    }
    return stamped(body)


def group_labels(owner: Owner, key: GroupKey) -> dict[str, str]:
    """Labels of what belongs to one group as a whole."""
    return {**names.revision_labels(owner.name, key.role, key.revision), names.LABEL_GROUP: str(key.index)}
