"""How many groups each role is to have now. Pure.

Static: what the spec says. Auto: what `autoscale.py` makes of the counts at present. External: what the role's
DisaggRoleScaler says, cut to the bounds of `scaling.ratio`. A cut only ever takes groups away, from the role that has
too many beside the other, and leaves one: a bound never asks for more than what was wished. A role that is wished at
zero ends serving, and bounds nothing.

A scaler that does not exist (yet, or any more) stands for the count at present, with which it is then made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_scaling import AUTO, EXTERNAL, Ratio, ScalerStatus
from headrace_operator.api_status import AutoScalingStatus, Status
from headrace_operator.autoscale import autoscaled
from headrace_operator.balance import State
from headrace_operator.observe import Observed
from headrace_operator.plans import Note
from headrace_operator.pressure import Pressed


@dataclass(frozen=True)
class Scaled:
    """The resource with the numbers of groups that are wanted now, and the wishes that were cut, in words."""

    deployment: DisaggDeployment
    cuts: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    autoscaling: AutoScalingStatus | None = None
    pressed: Mapping[str, Pressed | None] = field(default_factory=dict)  # by role, in mode Auto


def scaled(deployment: DisaggDeployment, observed: Observed, before: Status, now: float) -> Scaled:
    """`deployment` with the replicas that hold now; `before`: its status so far."""
    present = {role.name: role.replicas for role in before.roles if role.replicas is not None}
    wishes: dict[str, int] = {role.name: role.replicas for role in deployment.spec.roles}
    if deployment.spec.scaling.mode == AUTO:
        return _auto(deployment, observed, before, present, now)
    if deployment.spec.scaling.mode == EXTERNAL:
        wishes = {role: _wish(deployment, observed, role, present.get(role, count)) for role, count in wishes.items()}
    replicas, cuts = _within(deployment.spec.scaling.ratio, wishes)
    notes = _changes(present, replicas)
    told = {c.message for c in before.conditions if c.type == names.SCALING_LIMITED and c.status == "True"}
    if cuts and "; ".join(cuts) not in told:
        notes.append(Note(names.SCALING_LIMITED, "; ".join(cuts), is_warning=True))
    return Scaled(_with_replicas(deployment, replicas), tuple(cuts), tuple(notes))


def limitation(deployment: DisaggDeployment, cuts: Sequence[str]) -> tuple[bool, str, str]:
    """The condition ScalingLimited: whether a role has not the groups that it should, why, and in words."""
    is_auto = deployment.spec.scaling.mode == AUTO
    if cuts:
        return True, State.LIMITED.value if is_auto else names.REASON_RATIO_BOUND, "; ".join(cuts)
    if is_auto:
        return False, names.REASON_WITHIN_BOUNDS, "no role is short of groups that it could not get"
    return False, names.REASON_WITHIN_BOUNDS, "every role has the groups that its DisaggRoleScaler asks for"


def seed(replicas: int) -> int:
    """With how many groups a scaler is made: autoscalers take 0 for switched off and would never scale up again."""
    return max(1, replicas)


def scaler_status(deployment: str, role: str, observed: Observed) -> ScalerStatus:
    """What a role's scaler tells autoscalers."""
    labels = names.leader_labels(deployment, role)
    return ScalerStatus(
        replicas=len({key.index for key in observed.groups if key.role == role}),
        selector=",".join(f"{label}={value}" for label, value in labels.items()),
    )


def stale_scaler_statuses(observed: Observed) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Scalers whose status is not what it should be, each with that."""
    stale = []
    for (kind, name), body in sorted(observed.children.items()):
        if kind == names.SCALER_KIND and body["metadata"].get("deletionTimestamp") is None:
            deployment = body["metadata"]["labels"][names.LABEL_DEPLOYMENT]
            status = scaler_status(deployment, names.role_of_scaler(name), observed)
            wanted = status.model_dump(by_alias=True)
            if body.get("status") != wanted:
                stale.append((body, wanted))
    return stale


def _auto(
    deployment: DisaggDeployment, observed: Observed, before: Status, present: Mapping[str, int], now: float
) -> Scaled:
    auto = deployment.spec.scaling.auto
    if auto is None or not auto.dry_run:
        # Without a status (someone has emptied it) the groups that are there tell.
        there = Counter(role for role, _ in {(key.role, key.index) for key in observed.groups})
        roles = deployment.spec.roles
        counts: dict[str, int] = {
            role.name: present.get(role.name) or there[role.name] or role.replicas for role in roles
        }
        deployment = _with_replicas(deployment, counts)
    result = autoscaled(deployment, observed, before, now)
    status = result.status
    cuts = (status.message,) if status and status.state == State.LIMITED else ()
    notes = (*_changes(present, result.replicas), *result.notes)
    return Scaled(_with_replicas(deployment, result.replicas), cuts, notes, status, result.pressed)


def _with_replicas(deployment: DisaggDeployment, replicas: Mapping[str, int]) -> DisaggDeployment:
    roles = [role.model_copy(update={"replicas": replicas[role.name]}) for role in deployment.spec.roles]
    spec = deployment.spec.model_copy(update={"roles": roles})
    return deployment.model_copy(update={"spec": spec})


def _changes(present: Mapping[str, int], replicas: Mapping[str, int]) -> list[Note]:
    return [
        Note(names.EVENT_SCALED, f"{role} goes from {present[role]} to {count} groups")
        for role, count in replicas.items()
        if present.get(role, count) != count
    ]


def _wish(deployment: DisaggDeployment, observed: Observed, role: str, present: int) -> int:
    scaler = observed.children.get((names.SCALER_KIND, names.scaler_name(deployment.metadata.name, role)))
    return int(scaler["spec"]["replicas"]) if scaler else seed(present)


def _within(ratio: Ratio | None, wishes: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """The wishes cut to the bounds, and a sentence for each cut.

    Groups are whole, so cutting one role to its bound may bring the other over its own: both are cut in turn until
    nothing changes. Counts only ever fall and stay at one or more, so that ends.
    """
    replicas = dict(wishes)
    if ratio is None or not all(wishes.values()):
        return replicas, []
    sides = [
        (name, bound, role, other)
        for name, bound, role, other in (
            ("max", ratio.max, names.PREFILL, names.DECODE),
            ("min", ratio.min, names.DECODE, names.PREFILL),
        )
        if bound is not None
    ]
    before: dict[str, int] = {}
    while replicas != before:
        before = dict(replicas)
        for _, bound, role, other in sides:
            most = replicas[other] * getattr(bound, role) // getattr(bound, other)
            replicas[role] = min(replicas[role], max(1, most))
    return replicas, [
        f"{role} is wished at {wishes[role]} groups and has {replicas[role]}: scaling.ratio.{name} is {bound} "
        f"(prefill:decode) and {other} has {replicas[other]}"
        for name, bound, role, other in sides
        if replicas[role] < wishes[role]
    ]
