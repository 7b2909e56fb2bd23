"""The status of a DisaggDeployment: written by the operator only, once per pass and only if it changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Line = Annotated[str, StringConstraints(max_length=32768)]
MAX_REBUILDS = 2048


class StatusModel(BaseModel):
    """Base of the status models: camelCase outside, unknown fields ignored (an older operator reads a newer status)."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="ignore")


class Condition(StatusModel):
    """One observation about the deployment, as Kubernetes writes them."""

    type: str = Field(
        max_length=316,
        description="Valid, Available, Progressing, Ready, Protected or ScalingLimited; others may add their own.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(default=None, description="Generation of the spec that this speaks about.")
    last_transition_time: str = Field(
        description="When status last changed (UTC).", json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(max_length=1024, description="Why, in one CamelCase word.")
    message: Line = Field(description="Why, in words and numbers.")


class RoleStatus(StatusModel):
    """Counts of one role's groups."""

    name: str = Field(max_length=63, description="Name of the role.")
    replicas: int | None = Field(default=None, description="Groups that are wanted now: what scaling came to.")
    groups: int = Field(description="Groups that have pods, of any revision.")
    ready_groups: int = Field(description="Groups whose pods are all ready, of any revision.")
    updated_groups: int = Field(
        description="Groups of the wanted revision, ready or not, that replace no other any more."
    )
    failed_groups: int = Field(default=0, description="Groups given up: they failed restartPolicy.maxRestarts times.")
    revision: str = Field(max_length=63, description="The wanted revision: hash of the role's template.")


class NodeFailures(StatusModel):
    """How often a group failed on one node."""

    name: str = Field(max_length=253, description="Name of the node.")
    failures: int = Field(description="Failures there since the group was last well; from 2 on the node is avoided.")


class Rebuild(StatusModel):
    """A group that was, or is to be, made again from its own revision."""

    role: str = Field(max_length=63, description="Role of the group.")
    group: int = Field(description="Index of the group.")
    revision: str = Field(max_length=63, description="Revision of the group, from which it is made again.")
    failures: int = Field(description="Failures in a row; each doubles the wait before the next try, up to a cap.")
    given_up: bool = Field(
        default=False,
        description="true: it failed too often and is not made again until the role's template changes, more restarts "
        "are allowed, or `headrace retry` asks for it.",
    )
    nodes: list[NodeFailures] = Field(
        default_factory=list,
        max_length=8,
        description="Where it failed.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    last_time: str = Field(description="When it was last given up (UTC).", json_schema_extra={"format": "date-time"})
    message: Line = Field(description="What happened, with the last lines of the failed container.")


class LeavingGroup(StatusModel):
    """A group that was told to go for good and whose pods are not gone yet; any other group that goes comes back."""

    role: str = Field(max_length=63, description="Role of the group.")
    group: int = Field(description="Index of the group.")
    revision: str = Field(max_length=63, description="Revision of the group.")


class AutoScalingFloor(StatusModel):
    """A count of groups below which a role was short when it last gave."""

    role: str = Field(max_length=63, description="Name of the role.")
    replicas: int = Field(description="Groups that it keeps.")
    until: str = Field(description="Until when (UTC).", json_schema_extra={"format": "date-time"})


class AutoScalingStatus(StatusModel):
    """What scaling.mode Auto came to, and its memory between looks and restarts of the operator."""

    state: str = Field(
        max_length=63,
        description="Balanced, Holding (a role is short, but not for long yet), CoolingDown, Moved, WouldMove (dry "
        "run), NothingToGive, Settling (groups come or go), or SignalsMissing.",
    )
    message: Line = Field(description="Why, in words and numbers.")
    last_time: str = Field(
        description="When this was noted (UTC); a minute may pass before numbers are noted anew.",
        json_schema_extra={"format": "date-time"},
    )
    short_role: str | None = Field(default=None, max_length=63, description="The role that is to get groups.")
    short_since: str | None = Field(
        default=None,
        description="Since when it has been short at every look (UTC).",
        json_schema_extra={"format": "date-time"},
    )
    short_seen: str | None = Field(
        default=None,
        description="When that was last noted (UTC), every 30 s.",
        json_schema_extra={"format": "date-time"},
    )
    last_move: str | None = Field(
        default=None, description="When groups last moved (UTC).", json_schema_extra={"format": "date-time"}
    )
    last_move_to: str | None = Field(default=None, max_length=63, description="The role that got them.")
    last_move_message: Line | None = Field(default=None, description="From what to what, and why.")
    last_move_got: int = Field(default=0, description="Groups that they were.")
    last_move_given: int = Field(default=0, description="Groups that the other role gave for them.")
    last_move_pressure_percent: int = Field(
        default=0,
        description="Percent of its targets that the role was at; where the other gets worse, it is undone.",
    )
    floors: list[AutoScalingFloor] = Field(
        default_factory=list,
        max_length=2,
        description="Counts of groups that moves are not to go below for now, since one that did was undone.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    num_moves_back: int = Field(default=0, description="Moves back in a row; each doubles the wait for another.")


class Progress(StatusModel):
    """How far the present change has come at its best; the operator's memory between restarts."""

    generation: int = Field(description="Generation of the spec that is being carried out.")
    num_ready: int = Field(description="Ready groups of the wanted revisions.")
    num_old: int = Field(description="Groups that are in the way: of old revisions, or on their way out.")
    last_time: str = Field(
        description="When one of the two last improved (UTC).", json_schema_extra={"format": "date-time"}
    )


class Summary(StatusModel):
    """Texts for the columns of `kubectl get`."""

    prefill: str = Field(max_length=64, description="Groups that can prefill: ready/wanted.")
    decode: str = Field(max_length=64, description="Groups that can decode: ready/wanted.")
    topology: str = Field(max_length=256, description="Prefill groups + decode groups, such as 2xDP1 + 1xDEP2.")
    reason: Line = Field(description="Why it is not ready; empty if it is.")


class Status(StatusModel):
    """What is. Written by the operator."""

    observed_generation: int | None = Field(default=None, description="Generation of the spec that was last acted on.")
    conditions: list[Condition] = Field(
        default_factory=list,
        description="Valid, Available, Progressing, Ready, Protected; ScalingLimited unless scaling.mode is Static.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    roles: list[RoleStatus] = Field(
        default_factory=list,
        description="Counts of groups by role.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    rebuilds: list[Rebuild] = Field(
        default_factory=list,
        max_length=MAX_REBUILDS,
        description="Groups made again after a failure; the operator's memory between restarts.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    leaving: list[LeavingGroup] = Field(
        default_factory=list,
        max_length=MAX_REBUILDS,
        description="Groups that were told to go for good; the operator's memory between restarts.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    progress: Progress | None = Field(
        default=None, description="How far the present change has come; absent while nothing is to be changed."
    )
    autoscaling: AutoScalingStatus | None = Field(
        default=None, description="What scaling.mode Auto came to; absent in other modes."
    )
    summary: Summary | None = Field(default=None, description="Texts for the columns of kubectl get.")
