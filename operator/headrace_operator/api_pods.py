"""The parts of the resource that describe pods: resources and the template overlay.

Kubernetes' own shapes (tolerations, volumes, ...) are not copied into our CRD: the API server checks them when a pod
is made, and a refusal is reported in the resource's status.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema

from headrace_operator.rules import Rule, RuledModel

_QUANTITY = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
GPU_RESOURCE = "nvidia.com/gpu"


def _check_quantity(value: int | str) -> int | str:
    if isinstance(value, str) and not re.match(_QUANTITY, value):
        raise ValueError(f"{value!r} is not a Kubernetes quantity such as 2, 500m, 16Gi")
    return value


Quantity = Annotated[
    int | str,
    AfterValidator(_check_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY, "maxLength": 64}),
]
AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
Text = Annotated[str, Field(max_length=4096)]
Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]
Strings = Annotated[dict[str, Text], Field(max_length=64)]
Objects = Annotated[list[AnyObject], Field(max_length=64)]


def _named_schema(key: str) -> WithJsonSchema:
    """Schema of a list of Kubernetes objects of which only the identifying field is typed."""
    return WithJsonSchema(
        {
            "type": "array",
            "maxItems": 128,
            "items": {
                "type": "object",
                "required": [key],
                "properties": {key: {"type": "string", "minLength": 1, "maxLength": 4096}},
                "x-kubernetes-preserve-unknown-fields": True,
            },
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [key],
        }
    )


def _check_named(key: str) -> AfterValidator:
    def check(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        values = [item.get(key) for item in items]
        if not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"every item needs a {key}")
        if len(set(values)) != len(values):
            raise ValueError(f"{key} is used twice")
        return items

    return AfterValidator(check)


NamedObjects = Annotated[list[dict[str, Any]], Field(max_length=128), _check_named("name"), _named_schema("name")]
MountObjects = Annotated[
    list[dict[str, Any]], Field(max_length=128), _check_named("mountPath"), _named_schema("mountPath")
]


class Resources(RuledModel):
    """Compute resources of one container."""

    requests: Quantities = Field(
        default_factory=dict,
        description="Resources reserved for the container, by resource name (cpu in cores, memory in bytes). "
        "Default: none.",
    )
    limits: Quantities = Field(
        default_factory=dict,
        description="Resources the container may not exceed, by resource name (cpu in cores, memory in bytes). "
        "Default: none.",
    )

    def as_kubernetes(self) -> dict[str, Any]:
        """The container's `resources` block; empty if nothing is asked for."""
        block = {"requests": dict(self.requests), "limits": dict(self.limits)}
        return {key: value for key, value in block.items() if value}


class RoleResources(Resources):
    """Compute resources of one engine container, that is of each pod of the role."""

    gpu: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=f"GPUs of each pod: short for limits[{GPU_RESOURCE}]. One per rank, so equal to "
        "parallelism.dataLocal. Default: none (CPU).",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.gpu) || !has(self.limits) || !('{GPU_RESOURCE}' in self.limits)",
            message=f"set either gpu or limits[{GPU_RESOURCE}], not both",
            holds=lambda r: r.gpu is None or GPU_RESOURCE not in r.limits,
        ),
    )

    def as_kubernetes(self) -> dict[str, Any]:
        block = super().as_kubernetes()
        if self.gpu is not None:
            block["limits"] = {**block.get("limits", {}), GPU_RESOURCE: self.gpu}
        return block


class PodTemplate(RuledModel):
    """What to add to the pods that the operator renders."""

    labels: Strings = Field(
        default_factory=dict, description="Labels added to every pod; the operator's own labels win. Default: none."
    )
    annotations: Strings = Field(default_factory=dict, description="Annotations added to every pod. Default: none.")
    node_selector: Strings = Field(
        default_factory=dict, description="Node labels that a pod's node must have. Default: none (any node)."
    )
    tolerations: Objects = Field(
        default_factory=list, description="Taints that pods tolerate, as in a pod's spec.tolerations. Default: none."
    )
    affinity: AnyObject | None = Field(
        default=None, description="Scheduling affinity, as in a pod's spec.affinity. Default: none."
    )
    env: NamedObjects = Field(
        default_factory=list,
        description="Environment of the engine container, as in a container's env; a variable of the operator's own "
        "name is replaced. Default: none.",
    )
    volumes: NamedObjects = Field(
        default_factory=list, description="Volumes added to every pod, as in a pod's spec.volumes. Default: none."
    )
    volume_mounts: MountObjects = Field(
        default_factory=list,
        description="Mounts of the engine container, as in a container's volumeMounts. Default: none.",
    )
    pod_spec: AnyObject | None = Field(
        default=None,
        description="Any other field of a pod's spec, merged over the rendered pod: maps are merged, lists of named "
        "things (containers, initContainers, volumes) by name, anything else is replaced; the engine container is "
        "named engine. The operator keeps restartPolicy, hostname and subdomain. Default: none.",
    )
