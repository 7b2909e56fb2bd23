"""The DisaggDeployment resource: its nouns, defaults and rules.

This file and its parts `api_*.py` are the only source of the CRD (`make crds`). A field is here only if the
operator honours it. Every description says the unit and the default, because `kubectl explain` shows nothing else.
A default never changes: stored templates leave out what was the default when they were written.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from headrace_operator import names
from headrace_operator.api_engine import Engine, ImageName, Model, Transfer
from headrace_operator.api_failure import RestartPolicy
from headrace_operator.api_placement import Placement
from headrace_operator.api_pods import PodTemplate, Resources, RoleResources
from headrace_operator.api_rollout import RolloutStrategy
from headrace_operator.api_scaling import Scaling
from headrace_operator.rules import Rule, RuledModel, TransitionRule

RoleName = Literal["prefill", "decode", "unified"]


class Router(RuledModel):
    """The HTTP front of the deployment: Service NAME, port 8000."""

    replicas: int = Field(default=1, ge=0, le=100, description="Router pods. Default: 1.")
    image: ImageName | None = Field(
        default=None, description="Container image of the router. Default: the operator's (router.image of the chart)."
    )
    resources: Resources = Field(
        default=Resources(), description="Compute resources of each router pod. Default: none."
    )
    template: PodTemplate = Field(
        default=PodTemplate(),
        description="What to add to the router's pods, such as podSpec.imagePullSecrets. Default: nothing.",
    )


class Parallelism(RuledModel):
    """How one group's ranks share the work."""

    data: int = Field(
        default=1,
        ge=1,
        le=names.MAX_PODS_PER_GROUP,
        description="Data-parallel ranks of one group, each with its own cache. Default: 1.",
    )
    data_local: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks in one pod; a group has data / dataLocal pods. Default: data (one pod).",
    )
    expert: bool = Field(
        default=False,
        description="true: experts are sharded over the group's ranks (DEPn); false: each rank holds all experts. "
        "Default: false.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.dataLocal) ? self.data % self.dataLocal == 0 : self.data <= 64",
            message="dataLocal must divide data, and be set where data is over 64",
            holds=lambda p: p.data % p.data_local == 0 if p.data_local else p.data <= 64,
        ),
    )

    @property
    def ranks_per_pod(self) -> int:
        return self.data_local or self.data

    @property
    def num_pods(self) -> int:
        """Pods of one group."""
        return self.data // self.ranks_per_pod

    @property
    def label(self) -> str:
        """As topologies are written: DEP32, or DP1 where every rank holds all experts."""
        return f"{'DEP' if self.expert else 'DP'}{self.data}"


class Role(RuledModel):
    """One pool of groups."""

    name: RoleName = Field(
        description="prefill (computes prompts), decode (generates), or unified (both in one engine)."
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=names.MAX_GROUPS,
        description="Groups of this role; one group is one engine. Where scaling.mode is External: what a new "
        "deployment starts with. Default: 1.",
    )
    parallelism: Parallelism = Field(
        default=Parallelism(), description="Shape of each group. Default: one rank in one pod."
    )
    resources: RoleResources = Field(
        default=RoleResources(), description="Compute resources of each pod. Default: none."
    )
    template: PodTemplate = Field(
        default=PodTemplate(), description="What to add to the role's pods. Default: nothing."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.resources) || !has(self.resources.gpu) || self.resources.gpu == "
            "(has(self.parallelism.dataLocal) ? self.parallelism.dataLocal : self.parallelism.data)",
            message="resources.gpu must equal the ranks of a pod (parallelism.dataLocal): one GPU per rank",
            holds=lambda r: r.resources.gpu in (None, r.parallelism.ranks_per_pod),
        ),
    )


class Spec(RuledModel):
    """What is wanted."""

    model: Model = Field(description="The model that is served.")
    engine: Engine = Field(default=Engine(), description="Settings of every engine. Default: see its fields.")
    transfer: Transfer = Field(
        default=Transfer(), description="How KV moves from prefill to decode. Default: see its fields."
    )
    router: Router = Field(default=Router(), description="The HTTP front. Default: one pod.")
    roles: list[Role] = Field(
        min_length=1,
        max_length=2,
        description="The pools of groups: prefill and decode together, or unified alone.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    placement: Placement | None = Field(
        default=None,
        description="Where groups may run. If it is set (be it to {}), a group is only made once the cluster has room "
        "for all of its pods. Default: unset; pods are made at once, and wait for the scheduler or for an autoscaler.",
    )
    restart_policy: RestartPolicy = Field(
        default=RestartPolicy(), description="What becomes of groups that fail. Default: see its fields."
    )
    scaling: Scaling = Field(
        default=Scaling(), description="Who says how many groups a role has. Default: the spec (mode Static)."
    )
    drain_timeout_seconds: int = Field(
        default=120,
        ge=0,
        le=86400,
        description="Seconds that a pod about to be deleted may go on with the requests it has. Default: 120.",
    )
    rollout_strategy: RolloutStrategy = Field(
        default=RolloutStrategy(), description="How running groups are replaced. Default: see its fields."
    )
    paused: bool = Field(
        default=False,
        description="true: no old group is replaced by one of the wanted revision; scaling and the repair of failed "
        "groups go on. Default: false.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.roles.exists(r, r.name == 'unified') ? size(self.roles) == 1 : size(self.roles) == 2",
            message="roles must be prefill and decode together, or unified alone",
            holds=lambda s: (
                {role.name for role in s.roles} in ({"prefill", "decode"}, {"unified"}) and len(s.roles) <= 2
            ),
        ),
        Rule(
            cel="!has(self.scaling.ratio) || self.roles.exists(r, r.name == 'prefill')",
            message="scaling.ratio needs the roles prefill and decode",
            holds=lambda s: s.scaling.ratio is None or s.role("prefill") is not None,
        ),
        Rule(
            cel="!has(self.scaling.auto) || self.roles.exists(p, p.name == 'prefill' && self.roles.exists(d, "
            "d.name == 'decode' && self.scaling.auto.prefill.minReplicas * p.parallelism.data + "
            "self.scaling.auto.decode.minReplicas * d.parallelism.data <= self.scaling.auto.gpuBudget))",
            message="scaling.auto needs the roles prefill and decode, and a gpuBudget that holds minReplicas of both",
            holds=lambda s: s.scaling.auto is None or s.least_gpus <= s.scaling.auto.gpu_budget,
        ),
    )
    transition_rules: ClassVar[tuple[TransitionRule, ...]] = (
        TransitionRule(
            cel="self.model.name == oldSelf.model.name",
            message="model.name cannot be changed: clients know the model by it",
            holds=lambda old, new: old.model.name == new.model.name,
        ),
    )

    def role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    @property
    def least_gpus(self) -> float:
        """GPUs of the fewest groups that scaling.auto allows; infinite without both roles."""
        auto, roles = self.scaling.auto, [self.role("prefill"), self.role("decode")]
        return sum(
            auto.bounds(role.name).min_replicas * role.parallelism.data if auto and role else math.inf for role in roles
        )


_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
# What another deployment may call a Service of its engines: names.role_service_name.
_ENGINE_NAME = f"-({names.PREFILL}|{names.DECODE}|{names.UNIFIED})-{names.LEADERS}$"


class Metadata(RuledModel):
    """The part of metadata that rules speak about; the rest is Kubernetes' own."""

    name: str = Field(
        max_length=names.MAX_NAME_LENGTH,
        pattern=_NAME_PATTERN,
        description=f"Name of the deployment and of its Service; at most {names.MAX_NAME_LENGTH} characters.",
    )
    namespace: str = Field(default="default", description="Namespace of every child.")
    uid: str = Field(default="", description="Identity of the object, set by the API server.")
    generation: int = Field(default=1, description="Number of the spec, raised by the API server.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Notes of anyone; see names.py for ours.")


class DisaggDeployment(RuledModel):
    """A mixture-of-experts model served by separate prefill and decode pools behind one OpenAI-compatible router."""

    metadata: Metadata
    spec: Spec

    # Of the first two pydantic's own form is Metadata's constraints, which come first.
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"size(self.metadata.name) <= {names.MAX_NAME_LENGTH}",
            message=f"metadata.name may have {names.MAX_NAME_LENGTH} characters at most: pods are named by it",
            holds=lambda d: len(d.metadata.name) <= names.MAX_NAME_LENGTH,
        ),
        Rule(
            cel=f"self.metadata.name.matches('{_NAME_PATTERN}')",
            message="metadata.name must start with a letter and have only a-z, 0-9 and -: a Service is named by it",
            holds=lambda d: True,
        ),
        Rule(
            cel=f"!self.metadata.name.matches('{_ENGINE_NAME}')",
            message="metadata.name may not end like a Service of engines (-decode-leaders): two deployments could ask "
            "for one Service",
            holds=lambda d: not re.search(_ENGINE_NAME, d.metadata.name),
        ),
    )

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> Self:
        """Parse a file that a user wrote: anything unknown is an error (pydantic.ValidationError)."""
        return cls.model_validate({"metadata": _known_metadata(manifest), "spec": manifest.get("spec")})

    @classmethod
    def from_stored(cls, manifest: dict[str, Any]) -> Self:
        """Parse an object of the API server: fields of newer versions are ignored; rules are checked again."""
        return cls.model_validate({"metadata": _known_metadata(manifest), "spec": manifest.get("spec")}, extra="ignore")


def _known_metadata(manifest: dict[str, Any]) -> dict[str, Any]:
    metadata = manifest.get("metadata") or {}
    known = {key: metadata[key] for key in ("name", "namespace", "uid", "generation") if key in metadata}
    return known | ({"annotations": metadata["annotations"]} if metadata.get("annotations") else {})
