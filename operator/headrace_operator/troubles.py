"""Why a deployment's groups are not ready: the most telling reason among all their pods. Pure."""

from __future__ import annotations

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.decide import Decision
from headrace_operator.groups import OVERDUE_SECONDS, GroupState, Rebuild, Trouble
from headrace_operator.node_loss import lost_message
from headrace_operator.plans import Group
from headrace_operator.restarts import bad_nodes

# The most telling first: a later one is often only the consequence of an earlier one.
_PRECEDENCE = (
    names.REASON_RESTARTS_EXHAUSTED,
    names.REASON_IMAGE_PULL,
    names.REASON_CANNOT_START,
    names.REASON_CRASH_LOOP,
    names.REASON_NODE_LOST,
    names.REASON_API_MISSING,
    names.REASON_NAME_TAKEN,
    names.REASON_CAPACITY_UNKNOWN,
    names.REASON_NO_CAPACITY,
    names.REASON_UNSCHEDULABLE,
    names.REASON_SCHEDULING_GATED,
    names.REASON_WAITING_FOR_CLAIM,
    names.REASON_WAITING_FOR_COMPUTE_DOMAIN,
    names.REASON_PROBE_FAILING,
    names.REASON_DRAINING,
    names.REASON_REBUILDING,
    names.REASON_WAITING_FOR_GROUP,
    names.REASON_STARTING,
    names.REASON_SHRINKING_FIRST,
    names.REASON_CREATING,
    names.REASON_WAITING_FOR_PAIR,
    names.REASON_PAUSED,
)
# What no time heals: somebody has to do something.
STANDSTILL = (
    names.REASON_RESTARTS_EXHAUSTED,
    names.REASON_API_MISSING,
    names.REASON_NAME_TAKEN,
    names.REASON_NO_CAPACITY,
    names.REASON_PAUSED,
)
# One failure is an accident, several in a row are a crash loop.
_CRASH_LOOP_FAILURES = 2


def worst_trouble(deployment: DisaggDeployment, decision: Decision, now: float) -> Trouble | None:
    """The most telling reason why a group is not ready."""
    troubles: list[Trouble] = [decision.shortage] if decision.shortage else []
    for role in deployment.spec.roles:
        plan = decision.plans[role.name]
        noted = dict(plan.rebuilds)
        troubles += plan.blocked
        for group in (group for slot in plan.slots for group in slot.groups):
            if group.state is GroupState.READY:
                continue
            trouble = _group_trouble(group, noted.get(group.key), now)
            before = [key.revision for key in plan.leaving if key.index == group.key.index]
            if before and not group.pods and group.key not in noted:
                trouble = Trouble(names.REASON_CREATING, f"the one of revision {before[0]} is on its way out")
            where = f"{role.name} group {group.key.index} of {role.replicas}"
            troubles.append(Trouble(trouble.reason, f"{where}: {trouble.message}"))
    return min(troubles, key=lambda t: _PRECEDENCE.index(t.reason), default=None)


def _group_trouble(group: Group, noted: Rebuild | None, now: float) -> Trouble:
    failures, last_failure = (noted.failures, noted.message) if noted else (0, "")
    if noted and noted.is_final:
        return Trouble(
            names.REASON_RESTARTS_EXHAUSTED,
            f"given up after {failures - 1} restarts; change its template or run `headrace retry`; last: "
            f"{_with_bad_nodes(noted)}",
        )
    lost = lost_message(group.pods)
    if lost:
        return Trouble(names.REASON_NODE_LOST, f"{lost}; the group is made again elsewhere")
    for pod in group.pods:
        if pod.deadline is not None and now > pod.deadline + OVERDUE_SECONDS:
            text = f"pod {pod.name} should be gone; its node {pod.node} does not answer"
            return Trouble(names.REASON_NODE_LOST, text)
    seen = [pod.trouble for pod in group.pods if pod.trouble]
    worst = min(seen, key=lambda t: _PRECEDENCE.index(t.reason), default=None)
    if worst and _PRECEDENCE.index(worst.reason) < _PRECEDENCE.index(names.REASON_CRASH_LOOP):
        return worst
    if noted and failures >= _CRASH_LOOP_FAILURES:
        return Trouble(names.REASON_CRASH_LOOP, f"failed {failures} times in a row; last: {_with_bad_nodes(noted)}")
    if group.state in (GroupState.BROKEN, GroupState.TERMINATING):
        return Trouble(names.REASON_REBUILDING, last_failure or "its pods are being deleted")
    if group.state is GroupState.EMPTY:
        return Trouble(
            names.REASON_REBUILDING if last_failure else names.REASON_CREATING, last_failure or "no pods yet"
        )
    num_ready = sum(pod.is_ready for pod in group.pods)
    if num_ready and worst and worst.reason == names.REASON_STARTING:
        return Trouble(names.REASON_WAITING_FOR_GROUP, f"{num_ready} of {len(group.pods)} pods ready; {worst.message}")
    return worst or Trouble(names.REASON_STARTING, f"{num_ready} of {len(group.pods)} pods ready")


def _with_bad_nodes(noted: Rebuild) -> str:
    """The last failure, with the nodes that are avoided because of it."""
    counts = dict(noted.nodes)
    avoided = ", ".join(f"{node} (failed there {counts[node]} times)" for node in bad_nodes(noted))
    head, line_break, tail = noted.message.partition("\n")
    return f"{head}; avoided if there is another: {avoided}{line_break}{tail}" if avoided else noted.message
