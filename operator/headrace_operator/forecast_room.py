"""What room a forecast reckons with: the question, and its plain answer, a number of GPUs wherever they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace_operator.budget import cost_of
from headrace_operator.feasible import NextStep
from headrace_operator.groups import GroupKey, Pod, RoleState, Strategy
from headrace_operator.plans import Creation
from headrace_operator.rollout import plan_deployment


class RoomModel(Protocol):
    """Where the groups of a forecast find their room."""

    def plan(self, states: Sequence[RoleState], now: float) -> NextStep:
        """What the operator would do next."""

    def settle(self, states: Sequence[RoleState], step: NextStep, now: float) -> list[RoleState]:
        """What has become of the pods when all has come to rest. `states`: as `step` left them, new pods Pending."""


def in_use(states: Sequence[RoleState]) -> int:
    """GPUs (pods, if nothing asks for GPUs) of all groups."""
    return sum(cost_of(state, key.revision) for state in states for key in state.groups)


def made(creation: Creation) -> list[Pod]:
    """The pods of a creation, which have no node yet."""
    key = creation.key
    named = ((f"{key.role}-{key.revision}-{key.index}-{index}", index) for index in creation.pods)
    return [Pod(name, uid=name, index=index, phase="Pending") for name, index in named]


def ready(pod: Pod, now: float) -> Pod:
    """A pod that has a place, when it is ready; one that can get ready no more as it is."""
    if pod.is_ready or pod.is_finished or pod.is_lost or pod.is_edited or pod.is_restarted:
        return pod
    return replace(pod, phase="Running", is_ready=True, ready_since=now, trouble=None, unschedulable_since=None)


@dataclass(frozen=True)
class CountedRoom:
    """So many GPUs (pods, if nothing asks for GPUs) for all groups together; None: any number."""

    strategy: Strategy
    total: int | None = None

    def plan(self, states: Sequence[RoleState], now: float) -> NextStep:
        by_role = {state.role: state for state in states}
        unit = "GPUs" if any(state.costs for state in states) else "pods"
        used = in_use(states)

        def admit(key: GroupKey) -> str | None:
            nonlocal used
            need = cost_of(by_role[key.role], key.revision)
            if self.total is not None and used + need > self.total:
                what = unit if need != 1 else unit.removesuffix("s")
                return f"it needs {need} {what}, {self.total - used} of {self.total} are free"
            used += need
            return None

        # Without nodes there is no placement, and what the cluster lacks beside room is not known.
        return NextStep(plan_deployment(states, self.strategy, now, admit), None, None)

    def settle(self, states: Sequence[RoleState], step: NextStep, now: float) -> list[RoleState]:
        return [
            replace(state, groups={key: tuple(ready(pod, now) for pod in pods) for key, pods in state.groups.items()})
            for state in states
        ]
