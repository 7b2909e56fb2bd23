"""The status of a deployment, from what was observed and what was decided. Pure.

Conditions: Valid (the spec passes the rules), Available (every role has a ready group, and the router answers),
Progressing (something is being changed), Ready (all wanted groups, at the wanted revision, and the router are ready).
Reasons say why in one word, messages with names and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment, Role
from headrace_operator.api_status import Condition, Rebuild, RoleStatus, Status, Summary
from headrace_operator.decide import Decision
from headrace_operator.groups import OVERDUE_SECONDS, GroupState, Trouble
from headrace_operator.observe import Observed
from headrace_operator.rollout import RolePlan, Slot

_MAX_SUMMARY = 256
# The most telling first: a later one is often only the consequence of an earlier one.
_PRECEDENCE = (
    names.REASON_IMAGE_PULL,
    names.REASON_CANNOT_START,
    names.REASON_CRASH_LOOP,
    names.REASON_NODE_LOST,
    names.REASON_UNSCHEDULABLE,
    names.REASON_PROBE_FAILING,
    names.REASON_REBUILDING,
    names.REASON_WAITING_FOR_GROUP,
    names.REASON_STARTING,
    names.REASON_CREATING,
)
# One failure is an accident, several in a row are a crash loop.
_CRASH_LOOP_FAILURES = 2


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
    """The status after this pass. `refusals`: what the API server would not have."""
    generation = deployment.metadata.generation
    roles = [_role_status(role, decision.plans[role.name], decision) for role in deployment.spec.roles]
    router = _router_finding(deployment, observed)
    blocked = _blocked(decision, refusals)
    trouble = blocked or _worst_trouble(deployment, decision, now)
    ready = _ready(deployment, roles, router, trouble, decision)
    findings = {
        names.VALID: _Finding(True, names.REASON_SPEC_ACCEPTED, "the spec is valid"),
        names.AVAILABLE: _available(deployment, roles, router, trouble),
        names.PROGRESSING: _progressing(decision, blocked, ready),
        names.READY: ready,
    }
    return Status(
        observed_generation=generation,
        conditions=_conditions(before, findings, generation, now),
        roles=roles,
        rebuilds=_rebuilds(decision),
        summary=_summary(deployment, roles, ready),
    )


def as_applied(status: Status) -> dict[str, Any]:
    """The status as plain data for the API server."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def timestamp(seconds: float) -> str:
    """Epoch seconds as Kubernetes writes times, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


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
    return RoleStatus(
        name=role.name,
        groups=sum(bool(slot.pods) for slot in plan.slots),
        ready_groups=sum(slot.state is GroupState.READY for slot in plan.slots),
        updated_groups=sum(bool(slot.pods) and slot.revision == revision for slot in plan.slots),
        revision=revision,
    )


def _rebuilds(decision: Decision) -> list[Rebuild]:
    return [
        Rebuild(
            role=role,
            group=index,
            revision=noted.revision,
            failures=noted.failures,
            last_time=timestamp(noted.time),
            message=noted.message,
        )
        for role, plan in decision.plans.items()
        if role in decision.revisions
        for index, noted in plan.rebuilds
    ]


def _router_finding(deployment: DisaggDeployment, observed: Observed) -> _Finding:
    name = names.router_name(deployment.metadata.name)
    body = observed.children.get(("Deployment", name), {})
    counts = body.get("status") or {}
    num_ready = int(counts.get("availableReplicas") or 0)
    num_updated = int(counts.get("updatedReplicas") or 0)
    wanted = deployment.spec.router.replicas
    is_current = counts.get("observedGeneration") == body.get("metadata", {}).get("generation")
    text = f"router: {num_ready} of {wanted} pods ready"
    all_ready = is_current and num_ready >= wanted and num_updated >= wanted
    return _Finding(all_ready, names.REASON_SERVING if num_ready else names.REASON_ROUTER_NOT_READY, text)


def _blocked(decision: Decision, refusals: Sequence[str]) -> Trouble | None:
    if decision.taken:
        listed = ", ".join(decision.taken[:5])
        return Trouble(
            names.REASON_NAME_TAKEN,
            f"these exist and belong to someone else; delete them or rename the DisaggDeployment: {listed}",
        )
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        return Trouble(names.REASON_REFUSED, f"{refusals[0]}{more}")
    return None


def _worst_trouble(deployment: DisaggDeployment, decision: Decision, now: float) -> Trouble | None:
    """The most telling reason why a group is not ready."""
    troubles = []
    for role in deployment.spec.roles:
        plan = decision.plans[role.name]
        noted = dict(plan.rebuilds)
        for slot in plan.slots:
            if slot.state is GroupState.READY:
                continue
            rebuild = noted.get(slot.index)
            failures = rebuild.failures if rebuild else 0
            trouble = _slot_trouble(slot, failures, rebuild.message if rebuild else "", now)
            where = f"{role.name} group {slot.index} of {role.replicas}"
            troubles.append(Trouble(trouble.reason, f"{where}: {trouble.message}"))
    return min(troubles, key=lambda t: _PRECEDENCE.index(t.reason), default=None)


def _slot_trouble(slot: Slot, failures: int, last_failure: str, now: float) -> Trouble:
    for pod in slot.pods:
        if pod.deadline is not None and now > pod.deadline + OVERDUE_SECONDS:
            return Trouble(names.REASON_NODE_LOST, f"pod {pod.name} should be gone; its node does not answer")
    seen = [pod.trouble for pod in slot.pods if pod.trouble]
    worst = min(seen, key=lambda t: _PRECEDENCE.index(t.reason), default=None)
    if worst and _PRECEDENCE.index(worst.reason) < _PRECEDENCE.index(names.REASON_CRASH_LOOP):
        return worst
    if failures >= _CRASH_LOOP_FAILURES:
        return Trouble(names.REASON_CRASH_LOOP, f"failed {failures} times in a row; last: {last_failure}")
    if slot.state in (GroupState.BROKEN, GroupState.TERMINATING):
        return Trouble(names.REASON_REBUILDING, last_failure or "its pods are being deleted")
    if slot.state is GroupState.EMPTY:
        return Trouble(
            names.REASON_REBUILDING if last_failure else names.REASON_CREATING, last_failure or "no pods yet"
        )
    num_ready = sum(pod.is_ready for pod in slot.pods)
    if num_ready and worst and worst.reason == names.REASON_STARTING:
        return Trouble(names.REASON_WAITING_FOR_GROUP, f"{num_ready} of {len(slot.pods)} pods ready; {worst.message}")
    return worst or Trouble(names.REASON_STARTING, f"{num_ready} of {len(slot.pods)} pods ready")


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
        if status.updated_groups < role.replicas or not decision.plans[role.name].is_idle:
            message = f"{role.name}: {status.updated_groups} of {role.replicas} groups at revision {status.revision}"
            return _Finding(False, names.REASON_ROLLING_OUT, f"{message} ({counts})")
    if not router.holds:
        return _Finding(False, names.REASON_ROUTER_NOT_READY, f"{router.message} ({counts})")
    return _Finding(True, names.REASON_ALL_READY, f"{counts}; {router.message}")


def _available(
    deployment: DisaggDeployment, roles: Sequence[RoleStatus], router: _Finding, trouble: Trouble | None
) -> _Finding:
    counts = _counts(deployment, roles)
    missing = [role.name for role in roles if role.ready_groups == 0]
    if missing:
        reason = trouble.reason if trouble else names.REASON_CREATING
        return _Finding(False, reason, f"no ready group of {' and '.join(missing)} ({counts})")
    if router.reason == names.REASON_ROUTER_NOT_READY:
        return _Finding(False, names.REASON_ROUTER_NOT_READY, router.message)
    return _Finding(True, names.REASON_SERVING, counts)


def _progressing(decision: Decision, blocked: Trouble | None, ready: _Finding) -> _Finding:
    if blocked:
        return _Finding(False, blocked.reason, blocked.message)
    if ready.holds and not decision.apply and not decision.delete_pods and not decision.delete_children:
        return _Finding(False, names.REASON_SETTLED, "everything is as wanted")
    if any(slot.revision != decision.revisions.get(role) for role, p in decision.plans.items() for slot in p.slots):
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
