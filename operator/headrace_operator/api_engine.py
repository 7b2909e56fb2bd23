"""The parts of the resource that decide what an engine computes: model, engine settings, transfer."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from headrace_operator import names
from headrace_operator.rules import Rule, RuledModel

ImageName = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^\S+$")]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
DType = Literal["auto", "float32", "bfloat16"]
CacheDType = Literal["auto", "float32", "bfloat16", "fp8", "fp4"]

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
    "fake-quantization",
    "max-batch-tokens",
    "max-sequences",
    "num-blocks",
    "lease-seconds",
    "threads",
    "drain-seconds",
)
_OWN_FLAG_PATTERN = f"^--({'|'.join(_OWN_FLAGS)})(=|$)"


def _count_set(*values: Any) -> int:
    return sum(value is not None for value in values)


class TinySource(RuledModel):
    """A small random model that every pod writes for itself; for trying things out, needs no download."""

    family: Literal["v4", "v41"] = Field(
        description="Architecture of the model: v4 (DeepSeek-V4) or v41 (DeepSeek-V4.1)."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of its random weights. Default: 0.")


class HostPathSource(RuledModel):
    """A checkpoint folder that is present on every node."""

    path: str = Field(
        min_length=2,
        max_length=4096,
        pattern=r"^/[^:]+$",
        description="Absolute path of the folder on the node. "
        f"User {names.RUN_AS_USER} must be able to read it (or set template.podSpec.securityContext.runAsUser).",
    )


class ClaimSource(RuledModel):
    """A checkpoint folder on a PersistentVolumeClaim in the resource's namespace, mounted read-only."""

    claim_name: str = Field(
        min_length=1,
        max_length=253,
        description="Name of the PersistentVolumeClaim. "
        f"User {names.RUN_AS_USER} must be able to read it (or set template.podSpec.securityContext.runAsUser).",
    )
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
        pattern=r"^[^\s-]\S*$",  # a leading dash would look like a flag
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
    cache_dtype: CacheDType = Field(
        default="auto",
        description="Type of KV cache entries: fp8 and fp4 keep packed records (fp4: in the formats that the model was "
        "trained for, the smallest). Default: auto (as dtype).",
    )
    fake_quantization: Literal["none", "cache", "all"] = Field(
        default="none",
        description="Roundings of the model's training that the engine does, to come nearer to what the model was "
        "trained to be: cache (key/values, index keys and queries), all (also what is multiplied with quantized "
        "weights; slower). Default: none.",
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
    num_blocks: int = Field(default=1024, ge=1, le=2**22, description="KV blocks of one rank's cache. Default: 1024.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of one rank. Default: the engine's choice."
    )
    extra_args: list[Argument] = Field(
        default_factory=list,
        max_length=64,
        description="More arguments of the engine's command line, one item each, after the operator's own. As in any "
        "container $(NAME) is a variable of its environment, and $$ is one $. Default: none.",
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
            holds=lambda e: not any(re.match(_OWN_FLAG_PATTERN, arg) for arg in e.extra_args),
        ),
    )


class Transfer(RuledModel):
    """How KV moves from prefill to decode."""

    lease_seconds: int = Field(
        default=30,
        ge=1,
        le=3600,
        description="Seconds that decode waits for a prefill rank that has gone silent; one that is at work renews its "
        "lease. Default: 30.",
    )
