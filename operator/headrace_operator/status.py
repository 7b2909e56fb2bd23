"""The status of a deployment, from what was observed and what was decided. Pure.

Conditions: Valid (the spec passes the rules), Available (every role has a ready group, and the router answers),
Progressing (something is being changed), Ready (all wanted groups, at the wanted revision, and the router are ready),
Protected (draining a node leaves groups of every role), and where the spec does not say how many groups there are
ScalingLimited (a role has not as many as it should). Reasons say why in one word, messages with names and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment, Role
from headrace_operator.api_scaling import STATIC
from headrace_operator.api_status import Condition, Progress, RoleStatus, Status, Summary
from headrace_operator.decide import Decision
from headrace_operator.disruptions import protection
from headrace_operator.groups import GroupState, Trouble
from headrace_operator.memory import stored_leaving, stored_rebuilds
from headrace_operator.observe import Observed
from headrace_operator.plans import RolePlan
from headrace_operator.progress import progress_of, seconds_left
from headrace_operator.repairs import MAX_REPAIRS, WINDOW_SECONDS
from headrace_operator.scaling import limitation
from headrace_operator.times import timestamp
from headrace_operator.troubles import STANDSTILL, worst_trouble

_MAX_SUMMARY = 256
_MAX_LISTED = 5
_MAX_REFUSAL = 4096


@dataclass(frozen=True)
class _Finding:
    """A condition's value before it has a time."""

    holds: bool
    reason: str
    message: str


def invalid_status(before: Status, generation: int, problem: str, now: float) -> Status:
    """The stored spec breaks a rule: nothing is changed, the counts stay, and the condition says what to do."""
    findings = {
        names.VALID: _Finding(False, names.REASON_SPEC_INVALID, problem),
        names.PROGRESSING: _Finding(False, names.REASON_SPEC_INVALID, "the spec is not acted on until it is valid"),
        names.READY: _Finding(False, names.REASON_SPEC_INVALID, "the spec is not valid"),
    }
    summary = before.summary or Summary(prefill="", decode="", topology="", reason="")
    own = _conditions(before, findings, generation, now)
    kept = [c for c in before.conditions if c.type == names.AVAILABLE]
    return Status(
        observed_generation=generation,
        conditions=[*own, *kept],
        roles=before.roles,
        rebuilds=before.rebuilds,
        leaving=before.leaving,
        autoscaling=before.autoscaling,
        summary=summary.model_copy(update={"reason": f"{names.REASON_SPEC_INVALID}: {problem}"[:_MAX_SUMMARY]}),
    )


def status_of(
    deployment: DisaggDeployment,
    observed: Observed,
    decision: Decision,
    before: Status,
    refusals: Sequence[str],
    now: float,
) -> Status:
    """The status after this pass. `deployment`: as decided; `refusals`: what the API server would not have."""
    generation = deployment.metadata.generation
    roles = [_role_status(role, decision.plans[role.name], decision) for role in deployment.spec.roles]
    router = _router_finding(deployment, observed, decision)
    blocked = _blocked(decision, refusals)
    trouble = blocked or worst_trouble(deployment, decision, now)
    ready = _ready(deployment, roles, router, trouble, decision)
    is_paused = deployment.spec.paused and ready.reason == names.REASON_PAUSED
    progress = None
    if not ready.holds and not is_paused:
        progress = progress_of(before.progress, decision, generation, timestamp(now))
    findings = {
        names.VALID: _Finding(True, names.REASON_SPEC_ACCEPTED, "the spec is valid"),
        names.AVAILABLE: _available(deployment, roles, router, trouble),
        names.PROGRESSING: _progressing(deployment, decision, blocked, ready, progress, now),
        names.READY: ready,
        names.PROTECTED: _Finding(*protection(deployment, decision.plans)),
    }
    if deployment.spec.scaling.mode != STATIC:
        findings[names.SCALING_LIMITED] = _Finding(*limitation(deployment, decision.cuts))
    return Status(
        observed_generation=generation,
        conditions=_conditions(before, findings, generation, now),
        roles=roles,
        rebuilds=stored_rebuilds(decision.plans),
        leaving=stored_leaving(decision.plans),
        progress=progress,
        autoscaling=decision.autoscaling,
        summary=_summary(deployment, roles, ready),
    )


def as_applied(status: Status) -> dict[str, Any]:
    """The status as plain data for the API server."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def gate_condition(is_open: bool, now: float) -> dict[str, Any]:
    """A leader pod's readiness gate as a condition of its status.

    Times of pods have whole seconds: rounded up, so that nothing that waits from then on waits too short."""
    return {
        "type": names.GATE_SERVING,
        "status": "True" if is_open else "False",
        "reason": names.REASON_SERVING if is_open else names.REASON_DRAINING,
        "message": "routers may send requests" if is_open else "it finishes what it has and is deleted then",
        "lastTransitionTime": f"{timestamp(math.ceil(now))[:19]}Z",
    }


def topology(spec_roles: Sequence[Role]) -> str:
    """Such as `2xDP1 + 1xDEP2` (prefill + decode), or `1xDP1 unified`."""
    parts = {role.name: f"{role.replicas}x{role.parallelism.label}" for role in spec_roles}
    if names.UNIFIED in parts:
        return f"{parts[names.UNIFIED]} {names.UNIFIED}"
    return " + ".join(parts[name] for name in (names.PREFILL, names.DECODE) if name in parts)


def _conditions(before: Status, findings: Mapping[str, _Finding], generation: int, now: float) -> list[Condition]:
    """Findings as conditions; the time of a condition moves only when its status does."""
    known = {condition.type: condition for condition in before.conditions}
    result = []
    for kind, finding in findings.items():
        status = "True" if finding.holds else "False"
        old = known.get(kind)
        changed_at = old.last_transition_time if old and old.status == status else timestamp(now)
        result.append(
            Condition.model_validate(
                {
                    "type": kind,
                    "status": status,
                    "observed_generation": generation,
                    "last_transition_time": changed_at,
                    "reason": finding.reason,
                    "message": finding.message,
                }
            )
        )
    return result


def _role_status(role: Role, plan: RolePlan, decision: Decision) -> RoleStatus:
    revision = decision.revisions[role.name]
    given_up = {key for key, noted in plan.rebuilds if noted.is_final}
    return RoleStatus(
        name=role.name,
        replicas=role.replicas,
        groups=sum(bool(group.pods) for slot in plan.slots for group in slot.groups),
        ready_groups=sum(slot.is_ready for slot in plan.slots),
        updated_groups=sum(bool(slot.holder.pods) and slot.holder.revision == revision for slot in plan.slots),
        failed_groups=sum(
            group.state is not GroupState.READY and group.key in given_up
            for slot in plan.slots
            for group in slot.groups
        ),
        revision=revision,
    )


def _router_finding(deployment: DisaggDeployment, observed: Observed, decision: Decision) -> _Finding:
    name = names.router_name(deployment.metadata.name)
    body = observed.children.get(("Deployment", name), {})
    wanted = deployment.spec.router.replicas
    if wanted == 0:
        text = f"router: Deployment {name} is being removed" if body else "router: scaled to zero"
        return _Finding(not body, names.REASON_SCALED_TO_ZERO, text)
    counts = body.get("status") or {}
    num_ready = int(counts.get("availableReplicas") or 0)
    num_updated = int(counts.get("updatedReplicas") or 0)
    # Counts of an older Deployment say nothing about the one that this pass applies.
    is_applied = bool(body) and not decision.applies("Deployment")
    is_current = is_applied and counts.get("observedGeneration") == body["metadata"].get("generation")
    text = f"router: {num_ready} of {wanted} pods ready, {num_updated if is_current else 0} of them as wanted"
    all_ready = is_current and num_ready >= wanted and num_updated >= wanted
    return _Finding(all_ready, names.REASON_SERVING if num_ready else names.REASON_ROUTER_NOT_READY, text)


def _blocked(decision: Decision, refusals: Sequence[str]) -> Trouble | None:
    if decision.taken:
        listed = ", ".join(decision.taken[:_MAX_LISTED])
        return Trouble(
            names.REASON_NAME_TAKEN,
            f"these exist and belong to someone else; delete them or rename the DisaggDeployment: {listed}",
        )
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        return Trouble(names.REASON_REFUSED, f"{refusals[0][:_MAX_REFUSAL]}{more}")
    return None


def _ready(
    deployment: DisaggDeployment,
    roles: Sequence[RoleStatus],
    router: _Finding,
    trouble: Trouble | None,
    decision: Decision,
) -> _Finding:
    counts = _counts(deployment, roles)
    if trouble:
        return _Finding(False, trouble.reason, f"{trouble.message} ({counts})")
    for role, status in zip(deployment.spec.roles, roles, strict=True):
        plan = decision.plans[role.name]
        num_to_update = max(0, role.replicas - deployment.spec.rollout_strategy.partition)
        is_under_way = not plan.is_idle or any(slot.successor for slot in plan.slots)
        if status.updated_groups < num_to_update or is_under_way:
            message = f"{role.name}: {status.updated_groups} of {role.replicas} groups at revision {status.revision}"
            return _Finding(False, names.REASON_ROLLING_OUT, f"{message} ({counts})")
    if not router.holds:
        return _Finding(False, names.REASON_ROUTER_NOT_READY, f"{router.message} ({counts})")
    return _Finding(True, names.REASON_ALL_READY, f"{counts}; {router.message}")


def _available(
    deployment: DisaggDeployment, roles: Sequence[RoleStatus], router: _Finding, trouble: Trouble | None
) -> _Finding:
    counts = _counts(deployment, roles)
    unwanted = [role.name for role in deployment.spec.roles if role.replicas == 0]
    if unwanted:
        message = f"{' and '.join(unwanted)} scaled to zero: no request can be served ({counts})"
        return _Finding(False, names.REASON_SCALED_TO_ZERO, message)
    if deployment.spec.router.replicas == 0:
        return _Finding(False, names.REASON_SCALED_TO_ZERO, f"the router is scaled to zero ({counts})")
    missing = [role.name for role in roles if role.ready_groups == 0]
    if missing:
        reason = trouble.reason if trouble else names.REASON_CREATING
        return _Finding(False, reason, f"no ready group of {' and '.join(missing)} ({counts})")
    if router.reason == names.REASON_ROUTER_NOT_READY:
        return _Finding(False, names.REASON_ROUTER_NOT_READY, router.message)
    return _Finding(True, names.REASON_SERVING, counts)


def _progressing(
    deployment: DisaggDeployment,
    decision: Decision,
    blocked: Trouble | None,
    ready: _Finding,
    progress: Progress | None,
    now: float,
) -> _Finding:
    if blocked:
        return _Finding(False, blocked.reason, blocked.message)
    if decision.held_back:
        listed = ", ".join(decision.held_back[:_MAX_LISTED])
        message = (
            f"someone else keeps changing what the operator applies; within {WINDOW_SECONDS:.0f} s it was brought back "
            f"{MAX_REPAIRS} times and is now left as it is for up to as long: {listed}"
        )
        return _Finding(False, names.REASON_REPAIRS_PAUSED, message)
    if decision.shortage:
        return _Finding(False, decision.shortage.reason, decision.shortage.message)
    if ready.holds and not decision.apply and not decision.delete_pods and not decision.delete_children:
        return _Finding(False, names.REASON_SETTLED, "everything is as wanted")
    if ready.reason in STANDSTILL:
        return _Finding(False, ready.reason, ready.message)
    deadline = deployment.spec.rollout_strategy.progress_deadline_seconds
    if progress and seconds_left(progress, deadline, now) == 0:
        message = f"nothing has advanced for {deadline} s or more: {ready.reason}: {ready.message}"
        return _Finding(False, names.REASON_DEADLINE, message)
    if decision.drains.messages:
        told = [f"{k.role} group {k.index}: {text}" for k, text in sorted(decision.drains.messages.items())]
        return _Finding(True, names.REASON_DRAINING, "; ".join(told[:_MAX_LISTED]))
    if decision.is_rolling_out:
        return _Finding(True, names.REASON_ROLLING_OUT, ready.message)
    return _Finding(True, names.REASON_CREATING if ready.holds else ready.reason, ready.message)


def _counts(deployment: DisaggDeployment, roles: Sequence[RoleStatus]) -> str:
    wanted: dict[str, int] = {role.name: role.replicas for role in deployment.spec.roles}
    return ", ".join(f"{role.name} {role.ready_groups}/{wanted[role.name]} groups ready" for role in roles)


def _summary(deployment: DisaggDeployment, roles: Sequence[RoleStatus], ready: _Finding) -> Summary:
    """Unified groups do both phases, so they count for both columns."""
    wanted: dict[str, int] = {role.name: role.replicas for role in deployment.spec.roles}
    counts = {role.name: f"{role.ready_groups}/{wanted[role.name]}" for role in roles}
    unified = counts.get(names.UNIFIED, "")
    line = f"{ready.reason}: {ready.message}".partition("\n")[0]
    return Summary(
        prefill=counts.get(names.PREFILL, unified),
        decode=counts.get(names.DECODE, unified),
        topology=topology(deployment.spec.roles),
        reason="" if ready.holds else line[:_MAX_SUMMARY],
    )
