"""The parts of the resource that describe pods: resources and the template overlay.

Kubernetes' own shapes (tolerations, volumes, ...) are not copied into our CRD: the API server checks them when a pod
is made, and a refusal is reported in the resource's status.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from headrace_operator import names
from headrace_operator.rules import Rule, RuledModel

_QUANTITY = r"^(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
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


def _named_list(key: str) -> dict[str, Any]:
    """Schema of a list of Kubernetes objects of which only the identifying field is typed."""
    return {
        "type": "array",
        "maxItems": 128,
        "items": {
            "type": "object",
            "required": [key],
            "properties": {
                key: {"type": "string", "minLength": 1, "maxLength": 4096, "description": "Identity within the list."}
            },
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
    }


def _check_names(items: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    values = [item.get(key) for item in items]
    if not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"every item needs a {key}")
    if len(set(values)) != len(values):
        raise ValueError(f"{key} is used twice")
    return items


NamedObjects = Annotated[
    list[dict[str, Any]],
    Field(max_length=128),
    AfterValidator(lambda items: _check_names(items, "name")),
    WithJsonSchema(_named_list("name")),
]
MountObjects = Annotated[
    list[dict[str, Any]],
    Field(max_length=128),
    AfterValidator(lambda items: _check_names(items, "mountPath")),
    WithJsonSchema(_named_list("mountPath")),
]


# What the operator decides about a pod, and why a template may not say otherwise.
_DECIDED = {
    "restartPolicy": "a group's pods never restart one by one",
    "hostname": "group members find each other by it",
    "subdomain": "group members find each other by it",
    "terminationGracePeriodSeconds": "it follows drainTimeoutSeconds",
}
_NAMED_LISTS = ("containers", "initContainers", "volumes")


def _check_pod_spec(spec: dict[str, Any]) -> dict[str, Any]:
    for key in _NAMED_LISTS:
        items = spec.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{key} must be a list of objects")
        try:
            _check_names(items, "name")
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return spec


def _pod_spec_schema() -> WithJsonSchema:
    """An untyped pod spec, but for the fields that rules speak of."""
    properties: dict[str, Any] = {
        key: {
            "type": "integer" if key.endswith("Seconds") else "string",
            "description": f"May not be set: {reason}.",
            **({} if key.endswith("Seconds") else {"maxLength": 253}),
        }
        for key, reason in _DECIDED.items()
    }
    for key in _NAMED_LISTS:
        properties[key] = {**_named_list("name"), "description": f"As a pod's spec.{key}, merged by name."}
    return WithJsonSchema({"type": "object", "properties": properties, "x-kubernetes-preserve-unknown-fields": True})


PodSpec = Annotated[dict[str, Any], AfterValidator(_check_pod_spec), _pod_spec_schema()]


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


class Claim(RuledModel):
    """Devices that a driver hands out (resource.k8s.io), a claim of its own for each pod."""

    name: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the claim within the pod.",
    )
    resource_claim_template_name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of a ResourceClaimTemplate in the resource's namespace, from which each pod's claim is made.",
    )


class RoleResources(Resources):
    """Compute resources of one engine container, that is of each pod of the role."""

    gpu: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=f"GPUs of each pod: short for limits[{GPU_RESOURCE}]. One per rank, so equal to "
        "parallelism.dataLocal. Default: none (CPU).",
    )

    claims: list[Claim] = Field(
        default_factory=list,
        max_length=8,
        description="Devices claimed for each pod and used by its engine, such as GPUs of a DRA driver in place of "
        "gpu. spec.placement cannot count them (drivers choose devices by rules of their own): it looks for room of "
        "every other resource, and a group whose claims find no devices for 60 s is taken back and tried again. "
        "Default: none.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.claims) || !self.claims.exists(c, c.name == '{names.CLAIM_COMPUTE_DOMAIN}')",
            message=f"claims may not be named {names.CLAIM_COMPUTE_DOMAIN}: placement.computeDomain makes one",
            holds=lambda r: all(claim.name != names.CLAIM_COMPUTE_DOMAIN for claim in r.claims),
        ),
        Rule(
            cel=f"!has(self.gpu) || !has(self.limits) || !('{GPU_RESOURCE}' in self.limits)",
            message=f"set either gpu or limits[{GPU_RESOURCE}], not both",
            holds=lambda r: r.gpu is None or GPU_RESOURCE not in r.limits,
        ),
    )

    @property
    def num_gpus(self) -> int:
        """GPUs of each pod."""
        limit = self.limits.get(GPU_RESOURCE, 0)
        return self.gpu or (int(limit) if str(limit).isdecimal() else 0)

    def as_kubernetes(self) -> dict[str, Any]:
        block = super().as_kubernetes()
        if self.gpu is not None:
            block["limits"] = {**block.get("limits", {}), GPU_RESOURCE: self.gpu}
        return block

    @model_validator(mode="after")
    def _check_claims(self) -> Self:
        if len({claim.name for claim in self.claims}) != len(self.claims):
            raise ValueError("claims: name is used twice")
        return self


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
        description="Environment of the container, as in a container's env; a variable of the operator's own "
        "name is replaced. Default: none.",
    )
    volumes: NamedObjects = Field(
        default_factory=list, description="Volumes added to every pod, as in a pod's spec.volumes. Default: none."
    )
    volume_mounts: MountObjects = Field(
        default_factory=list,
        description="Mounts of the container, as in a container's volumeMounts. Default: none.",
    )
    pod_spec: PodSpec | None = Field(
        default=None,
        description="Any other field of a pod's spec, merged over the rendered pod: maps are merged, lists of named "
        "things (containers, initContainers, volumes) by name, anything else is replaced; the operator's container is "
        "named engine, or router in a router pod. May not set "
        f"{', '.join(_DECIDED)}. Default: none.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.podSpec) || !({' || '.join(f'has(self.podSpec.{key})' for key in _DECIDED)})",
            message=f"podSpec may not set {', '.join(_DECIDED)}: the operator does",
            holds=lambda t: not (t.pod_spec or {}).keys() & _DECIDED.keys(),
        ),
    )
