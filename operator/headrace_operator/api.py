"""The DisaggDeployment resource: its nouns, defaults and rules.

This file, `api_pods.py` and `api_status.py` are the only source of the CRD (`make crds`). A field is here only if the
operator honours it. Every description says the unit and the default, because `kubectl explain` shows nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints

from headrace_operator import names
from headrace_operator.api_pods import PodTemplate, Resources, RoleResources
from headrace_operator.rules import Rule, RuledModel, TransitionRule

ImageName = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^\S+$")]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
DType = Literal["auto", "float32", "bfloat16"]
RoleName = Literal["prefill", "decode", "unified"]

# Flags that the operator derives from typed fields; two sources for one flag would be a lie in one of them.
_OWN_FLAGS = (
    "model",
    "tiny",
    "served-model-name",
    "role",
    "data",
    "data-local",
    "pod-index",
    "expert-parallel",
    "leader-host",
    "host",
    "port",
    "rendezvous-port",
    "control-port",
    "max-model-len",
    "block-size",
    "dtype",
    "cache-dtype",
    "max-batch-tokens",
    "max-sequences",
    "num-blocks",
    "lease-seconds",
    "threads",
    "drain-seconds",
)
_OWN_FLAG_PATTERN = f"^--({'|'.join(_OWN_FLAGS)})(=.*)?$"


def _count_set(*values: Any) -> int:
    return sum(value is not None for value in values)


class TinySource(RuledModel):
    """A small random model that every pod writes for itself; for trying things out, needs no download."""

    family: Literal["v4"] = Field(description="Architecture of the model: v4 (DeepSeek-V4).")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of its random weights. Default: 0.")


class HostPathSource(RuledModel):
    """A checkpoint folder that is present on every node."""

    path: str = Field(
        min_length=2, max_length=4096, pattern=r"^/[^:]+$", description="Absolute path of the folder on the node."
    )


class ClaimSource(RuledModel):
    """A checkpoint folder on a PersistentVolumeClaim in the resource's namespace, mounted read-only."""

    claim_name: str = Field(min_length=1, max_length=253, description="Name of the PersistentVolumeClaim.")
    path: str = Field(
        default="",
        max_length=4096,
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*)?$",
        description="Folder within the volume, relative to its root. Default: the root.",
    )


class ModelSource(RuledModel):
    """Where the checkpoint comes from: exactly one of the fields."""

    tiny: TinySource | None = Field(default=None, description="A small random model, written by each pod.")
    host_path: HostPathSource | None = Field(default=None, description="A folder on every node.")
    pvc: ClaimSource | None = Field(default=None, description="A folder on a PersistentVolumeClaim.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(has(self.tiny) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) + (has(self.pvc) ? 1 : 0) == 1",
            message="set exactly one of tiny, hostPath, pvc",
            holds=lambda s: _count_set(s.tiny, s.host_path, s.pvc) == 1,
        ),
    )


class Model(RuledModel):
    """The model that is served."""

    name: str = Field(
        min_length=1,
        max_length=256,
        pattern=r"^\S+$",
        description="Name that clients use in the model field of their requests. Cannot be changed: make another "
        "DisaggDeployment.",
    )
    source: ModelSource = Field(description="Where the checkpoint comes from.")


class Engine(RuledModel):
    """Settings of every engine, the same for all roles so that their KV caches are of one shape."""

    image: ImageName | None = Field(
        default=None,
        description="Container image of the engine. Default: the operator's (engine.image of the chart), resolved when "
        "a revision is first made, so that upgrading the operator restarts no pod.",
    )
    max_model_len: int = Field(
        default=8192, ge=2, le=2**24, description="Longest prompt plus generation, in tokens. Default: 8192."
    )
    block_size: int = Field(
        default=128,
        ge=1,
        le=65536,
        description="Tokens of one KV block; a multiple of every compression ratio of the model (V4: 128). "
        "Default: 128.",
    )
    dtype: DType = Field(default="auto", description="Compute type. Default: auto (the checkpoint's own).")
    cache_dtype: DType = Field(
        default="auto", description="Type of KV cache entries. Default: auto (the checkpoint's own)."
    )
    max_batch_tokens: int = Field(
        default=2048,
        ge=1,
        le=2**20,
        description="Tokens that one rank computes in one step at most; longer prompts are split. Default: 2048.",
    )
    max_sequences: int = Field(
        default=32, ge=1, le=65536, description="Sequences that one rank runs at once at most. Default: 32."
    )
    num_blocks: int = Field(default=1024, ge=1, le=2**24, description="KV blocks of one rank's cache. Default: 1024.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of one rank. Default: the engine's choice."
    )
    extra_args: list[Argument] = Field(
        default_factory=list,
        max_length=64,
        description="More arguments of the engine's command line, one item each, after the operator's own. "
        "Default: none.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.numBlocks * self.blockSize >= self.maxModelLen",
            message="numBlocks * blockSize must be at least maxModelLen: one sequence must fit the cache of a rank",
            holds=lambda e: e.num_blocks * e.block_size >= e.max_model_len,
        ),
        Rule(
            cel=f"!has(self.extraArgs) || !self.extraArgs.exists(a, a.matches('{_OWN_FLAG_PATTERN}'))",
            message="extraArgs may not repeat a flag that the operator sets from other fields",
            holds=lambda e: not any(arg.split("=")[0].removeprefix("--") in _OWN_FLAGS for arg in e.extra_args),
        ),
    )


class Transfer(RuledModel):
    """How KV moves from prefill to decode."""

    lease_seconds: int = Field(
        default=30,
        ge=1,
        le=3600,
        description="Seconds after which a prefill engine may start no more writes for a request. Default: 30.",
    )


class Router(RuledModel):
    """The HTTP front of the deployment: Service NAME, port 8000."""

    replicas: int = Field(default=1, ge=0, le=100, description="Router pods. Default: 1.")
    image: ImageName | None = Field(
        default=None, description="Container image of the router. Default: the operator's (router.image of the chart)."
    )
    resources: Resources = Field(
        default=Resources(), description="Compute resources of each router pod. Default: none."
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
        default=1, ge=0, le=names.MAX_GROUPS, description="Groups of this role; one group is one engine. Default: 1."
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
    drain_timeout_seconds: int = Field(
        default=120,
        ge=0,
        le=86400,
        description="Seconds that a pod about to be deleted may go on with the requests it has. Default: 120.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.roles.exists(r, r.name == 'unified') ? size(self.roles) == 1 : size(self.roles) == 2",
            message="roles must be prefill and decode together, or unified alone",
            holds=lambda s: (
                {role.name for role in s.roles} in ({"prefill", "decode"}, {"unified"}) and len(s.roles) <= 2
            ),
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


_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


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


class DisaggDeployment(RuledModel):
    """A mixture-of-experts model served by separate prefill and decode pools behind one OpenAI-compatible router."""

    metadata: Metadata
    spec: Spec

    # The API server sees the whole object here; pydantic's own form of the rule is Metadata's constraints.
    object_rules: ClassVar[tuple[Rule, ...]] = (
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
    return {key: metadata[key] for key in ("name", "namespace", "uid", "generation") if key in metadata}
