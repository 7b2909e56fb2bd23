"""What rendered objects share: metadata, owner, the stamp of what was applied, probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.revision import content_hash


@dataclass(frozen=True)
class Owner:
    """The DisaggDeployment that children belong to."""

    name: str
    namespace: str
    uid: str

    @classmethod
    def of(cls, deployment: DisaggDeployment) -> Owner:
        metadata = deployment.metadata
        return cls(metadata.name, metadata.namespace, metadata.uid)


def metadata(
    owner: Owner, name: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Metadata of a child. Without the owner's uid (a file that was never applied) there is no owner reference."""
    result: dict[str, Any] = {"name": name, "namespace": owner.namespace, "labels": dict(labels)}
    if annotations:
        result["annotations"] = dict(annotations)
    if owner.uid:
        result["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return result


def stamped(body: dict[str, Any]) -> dict[str, Any]:
    """The object with the hash of itself in an annotation."""
    meta = body["metadata"]
    annotations = {**meta.get("annotations", {}), names.ANNOTATION_APPLIED: content_hash(body)[:16]}
    return {**body, "metadata": {**meta, "annotations": annotations}}


def http_probe(path: str, period: int, failures: int) -> dict[str, Any]:
    """A kubelet's probe of a container's `http` port: every `period` seconds, given up after `failures` in a row."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }
