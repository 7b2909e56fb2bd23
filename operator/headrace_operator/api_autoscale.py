"""The part of the resource that has the operator move capacity between prefill and decode (scaling.mode: Auto)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from headrace_operator import names
from headrace_operator.rules import Rule, RuledModel


class RoleBounds(RuledModel):
    """How few and how many groups a role may have."""

    min_replicas: int = Field(default=1, ge=1, le=names.MAX_GROUPS, description="Groups at the least. Default: 1.")
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=names.MAX_GROUPS,
        description="Groups at the most. Default: as many as gpuBudget holds beside the other role.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas may not be over maxReplicas",
            holds=lambda b: b.max_replicas is None or b.min_replicas <= b.max_replicas,
        ),
    )


class Targets(RuledModel):
    """What requests are to get. A role that keeps a target has something to give; one that misses it is short."""

    first_token_milliseconds: int = Field(
        default=2000,
        ge=1,
        le=3_600_000,
        description="Milliseconds to the first token that 9 of 10 requests are not to exceed. Prefill answers for the "
        "time from the decode group's ticket on, and for the work it has queued; decode for the time to the ticket. "
        "Default: 2000.",
    )
    inter_token_milliseconds: int = Field(
        default=100,
        ge=1,
        le=3_600_000,
        description="Milliseconds between tokens that 9 of 10 tokens are not to exceed; decode's. Default: 100.",
    )
    kv_use_percent: int = Field(
        default=90, ge=1, le=100, description="Percent of decode's KV blocks that may be in use. Default: 90."
    )
    requests_per_rank: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Live requests that a decode rank may have, on average. Default: engine.maxSequences.",
    )


class AutoScaling(RuledModel):
    """Moves of groups between prefill and decode, within one budget, from what the engines say of themselves."""

    gpu_budget: int = Field(
        ge=2,
        le=1_000_000,
        description="GPUs that the groups of both roles may have together. A rank counts as one, on CPU engines too. "
        "Groups of a roll-out's maxSurge come on top.",
    )
    dry_run: bool = Field(
        default=False,
        description="true: roles[].replicas holds, and status and events only tell what would be done. Default: false.",
    )
    prefill: RoleBounds = Field(default=RoleBounds(), description="Bounds of prefill. Default: 1 and up.")
    decode: RoleBounds = Field(default=RoleBounds(), description="Bounds of decode. Default: 1 and up.")
    targets: Targets = Field(default=Targets(), description="What requests are to get. Default: see its fields.")
    interval_seconds: int = Field(
        default=15, ge=1, le=60, description="Seconds between two looks at the engines. Default: 15."
    )
    hold_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds that a role must have been short, at every look, before it gets a group. Default: 60.",
    )
    cooldown_seconds: int = Field(
        default=300,
        ge=30,
        le=86400,
        description="Seconds from one move to the next, so that it shows (engines tell of their last 30 s). A move "
        "back waits for twice as long, the next one for four times, up to sixteen times. Default: 300.",
    )

    def bounds(self, role: str) -> RoleBounds:
        return self.prefill if role == names.PREFILL else self.decode
