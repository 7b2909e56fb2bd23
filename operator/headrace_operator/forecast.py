"""The steps that a change will take, found by running the planner against a cluster that does what it is told. Pure.

It is the operator's own `plan_deployment`, so the order, the bounds and the reasons are those of the real thing. What a
forecast cannot know it takes for granted: pods become ready, drains end, nodes live, and no one else takes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace_operator.groups import GroupKey, Pod, RoleState, Strategy
from headrace_operator.plans import RolePlan
from headrace_operator.rollout import plan_deployment

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


@dataclass(frozen=True)
class Forecast:
    """All steps until nothing more is done. `blocked`: why that is not all that is wanted; empty: it is."""

    steps: tuple[Step, ...]
    blocked: tuple[str, ...]
    unit: str  # of num_in_use


def forecast(states: Sequence[RoleState], strategy: Strategy, now: float, num_free: int | None = None) -> Forecast:
    """Steps from `states` to what they ask for. `num_free`: GPUs (or pods) left for more groups; None: any number."""
    unit = "GPUs" if any(state.costs for state in states) else "pods"
    states = list(states)
    total = None if num_free is None else _in_use(states) + num_free
    steps: list[Step] = []
    max_steps = _MIN_STEPS + _STEPS_PER_GROUP * sum(state.replicas + len(state.groups) for state in states)
    for _ in range(max_steps):
        plans = plan_deployment(states, strategy, now, _admission(states, total, unit))
        step = _step(states, plans)
        if step.actions:
            steps.append(step)
        waits = [plan.wait_seconds for plan in plans.values() if plan.wait_seconds is not None]
        after = [_after(state, plans[state.role], now) for state in states]
        if after == states and not waits:
            return Forecast(tuple(steps), _obstacles(plans), unit)
        states = after
        now += 1.0 if step.actions else max(1.0, min(waits, default=1.0))
    return Forecast(tuple(steps), (f"no end in sight after {max_steps} steps",), unit)


def _in_use(states: Sequence[RoleState]) -> int:
    return sum(_cost(state, key) for state in states for key in state.groups)


def _cost(state: RoleState, key: GroupKey) -> int:
    return state.costs.get(key.revision, state.sizes.get(key.revision, 1))


def _admission(states: Sequence[RoleState], total: int | None, unit: str) -> Callable[[GroupKey], str | None]:
    by_role = {state.role: state for state in states}
    used = _in_use(states)

    def admit(key: GroupKey) -> str | None:
        nonlocal used
        need = _cost(by_role[key.role], key)
        if total is not None and used + need > total:
            return (
                f"it needs {need} {unit if need != 1 else unit.removesuffix('s')}, {total - used} of {total} are free"
            )
        used += need
        return None

    return admit


def _step(states: Sequence[RoleState], plans: dict[str, RolePlan]) -> Step:
    actions: list[Action] = []
    available = []
    num_made = 0
    for state in states:
        plan = plans[state.role]
        gone = {deletion.uid for deletion in plan.delete}
        for key, pods in sorted(state.groups.items()):
            num_gone = sum(pod.uid in gone for pod in pods)
            if num_gone:
                actions.append(Action("remove", key, num_gone))
        for creation in plan.create:
            actions.append(Action("make", creation.key, len(creation.pods)))
            num_made += _cost(state, creation.key) if creation.key not in state.groups else 0
        held = [slot for slot in plan.slots if any(g.is_available and not _goes(g.pods, gone) for g in slot.groups)]
        available.append((state.role, len(held)))
    return Step(tuple(actions), tuple(available), _in_use(states) + num_made)


def _goes(pods: Sequence[Pod], gone: set[str]) -> bool:
    return any(pod.uid in gone for pod in pods)


def _after(state: RoleState, plan: RolePlan, now: float) -> RoleState:
    """The role once the plan is carried out: what was deleted is gone, and what exists is ready."""
    gone = {deletion.uid for deletion in plan.delete}
    groups: dict[GroupKey, tuple[Pod, ...]] = {}
    for key, pods in state.groups.items():
        left = tuple(_ready(pod, now) for pod in pods if pod.uid not in gone and not pod.is_terminating)
        if left:
            groups[key] = left
    for creation in plan.create:
        made = [Pod(name := f"{creation.key}-{i}", name, i, "Running", True, ready_since=now) for i in creation.pods]
        both = [*groups.get(creation.key, ()), *made]
        groups[creation.key] = tuple(sorted(both, key=lambda pod: pod.index))
    leaving = frozenset(key for key in plan.leaving if key in groups)
    return replace(state, groups=groups, rebuilds=dict(plan.rebuilds), leaving=leaving, retried=frozenset())


def _ready(pod: Pod, now: float) -> Pod:
    if pod.is_ready or pod.is_finished or pod.is_lost or pod.is_edited or pod.is_restarted:
        return pod
    return replace(pod, phase="Running", is_ready=True, ready_since=now, trouble=None, unschedulable_since=None)


def _obstacles(plans: dict[str, RolePlan]) -> tuple[str, ...]:
    found = [f"{trouble.reason}: {trouble.message}" for plan in plans.values() for trouble in plan.blocked]
    for role, plan in plans.items():
        found += [f"{role} group {slot.index} does not become ready" for slot in plan.slots if not slot.is_ready]
    return tuple(found)
