"""The steps that a change will take, found by running the planner against a cluster that does what it is told. Pure.

It is the operator's own planner, so the order, the bounds and the reasons are those of the real thing. What a forecast
cannot know it takes for granted: pods that have room become ready, drains end, nodes live, and no one else takes room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_operator import names
from headrace_operator.budget import cost_of
from headrace_operator.feasible import NextStep
from headrace_operator.forecast_room import RoomModel, in_use, made
from headrace_operator.groups import GroupKey, Pod, RoleState
from headrace_operator.plans import RolePlan

_STEPS_PER_GROUP = 6
_MIN_STEPS = 60


@dataclass(frozen=True)
class Action:
    """A group that is made, or that goes (drained if it can be)."""

    verb: str  # make, remove
    group: GroupKey
    num_pods: int


@dataclass(frozen=True)
class Step:
    """What is done at once, before the next step waits for pods to be ready or gone."""

    actions: tuple[Action, ...]
    available: tuple[tuple[str, int], ...]  # role -> slots that have a ready group while the step goes on
    num_in_use: int  # GPUs (pods, if nothing asks for GPUs) of all groups while the step goes on
    shortage: str = ""  # what there is no room for meanwhile; empty: nothing waits for room


@dataclass(frozen=True)
class Forecast:
    """All steps until nothing more is done. `blocked`: why that is not all that is wanted; empty: it is."""

    steps: tuple[Step, ...]
    blocked: tuple[str, ...]
    unit: str  # of num_in_use


def forecast(states: Sequence[RoleState], room: RoomModel, now: float) -> Forecast:
    """Steps from `states` to what they ask for, with the room that there is."""
    states = list(states)
    steps: list[Step] = []
    max_steps = _MIN_STEPS + _STEPS_PER_GROUP * sum(state.replicas + len(state.groups) for state in states)
    for _ in range(max_steps):
        taken = room.plan(states, now)
        carried_out = [_carried_out(state, taken.plans[state.role]) for state in states]
        after = room.settle(carried_out, taken, now)
        step = _step(states, taken, _shortage(taken, after))
        if step.actions:
            steps.append(step)
        waits = [plan.wait_seconds for plan in taken.plans.values() if plan.wait_seconds is not None]
        if taken.admission and taken.admission.wait_seconds is not None:
            waits.append(taken.admission.wait_seconds)
        if after == states and not waits:
            return Forecast(tuple(steps), _obstacles(taken, step.shortage), _unit(states))
        states = after
        now += 1.0 if step.actions else max(1.0, min(waits, default=1.0))
    return Forecast(tuple(steps), (f"no end in sight after {max_steps} steps",), _unit(states))


def _unit(states: Sequence[RoleState]) -> str:
    return "GPUs" if any(state.costs for state in states) else "pods"


def _shortage(taken: NextStep, after: Sequence[RoleState]) -> str:
    """What there is no room for: groups that are not made, or pods that were made and find no node."""
    if taken.admission and taken.admission.shortage:
        return taken.admission.shortage.message
    troubles = [pod.trouble for state in after for pods in state.groups.values() for pod in pods if pod.trouble]
    return next((trouble.message for trouble in troubles if trouble.reason == names.REASON_UNSCHEDULABLE), "")


def _step(states: Sequence[RoleState], taken: NextStep, shortage: str) -> Step:
    actions: list[Action] = []
    available = []
    num_made = 0
    for state in states:
        plan = taken.plans[state.role]
        gone = {deletion.uid for deletion in plan.delete}
        for key, pods in sorted(state.groups.items()):
            num_gone = sum(pod.uid in gone for pod in pods)
            if num_gone:
                actions.append(Action("remove", key, num_gone))
        for creation in plan.create:
            actions.append(Action("make", creation.key, len(creation.pods)))
            num_made += cost_of(state, creation.key.revision) if creation.key not in state.groups else 0
        held = [slot for slot in plan.slots if any(g.is_available and not _goes(g.pods, gone) for g in slot.groups)]
        available.append((state.role, len(held)))
    return Step(tuple(actions), tuple(available), in_use(states) + num_made, shortage)


def _goes(pods: Sequence[Pod], gone: set[str]) -> bool:
    return any(pod.uid in gone for pod in pods)


def _carried_out(state: RoleState, plan: RolePlan) -> RoleState:
    """The role right after the plan was carried out: what was deleted is gone, and what was made has no node yet."""
    gone = {deletion.uid for deletion in plan.delete}
    groups: dict[GroupKey, tuple[Pod, ...]] = {}
    for key, pods in state.groups.items():
        left = tuple(pod for pod in pods if pod.uid not in gone and not pod.is_terminating)
        if left:
            groups[key] = left
    for creation in plan.create:
        both = [*groups.get(creation.key, ()), *made(creation)]
        groups[creation.key] = tuple(sorted(both, key=lambda pod: pod.index))
    leaving = frozenset(key for key in plan.leaving if key in groups)
    return replace(state, groups=groups, rebuilds=dict(plan.rebuilds), leaving=leaving, retried=frozenset())


def _obstacles(taken: NextStep, shortage: str) -> tuple[str, ...]:
    """Why there is no further step, each reason once."""
    found = [f"{names.REASON_NO_CAPACITY}: {shortage}"] if shortage else []
    for trouble in (trouble for plan in taken.plans.values() for trouble in plan.blocked):
        if not (shortage and trouble.message.endswith(shortage)):
            found.append(f"{trouble.reason}: {trouble.message}")
    for role, plan in taken.plans.items():
        found += [f"{role} group {slot.index} does not become ready" for slot in plan.slots if not slot.is_ready]
    return tuple(found)
