"""A forecast's room on the nodes of a cluster. Pure.

The next step is `next_step`, which the operator takes too, and the operator's census counts what is left. The part of
the scheduler is played by `fill`: of several nodes that would do it takes the tightest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_operator import names
from headrace_operator.admission import Capacity
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_placement import Placement
from headrace_operator.capacity import GroupShape, Room, fill
from headrace_operator.census import Census
from headrace_operator.companions import Companions
from headrace_operator.feasible import NextStep, next_step
from headrace_operator.forecast_room import made, ready
from headrace_operator.groups import GroupKey, Pod, RoleState, Trouble
from headrace_operator.observe import Observed
from headrace_operator.placement import Pins, Wish, allot
from headrace_operator.render.objects import Owner
from headrace_operator.revision import RoleTemplate
from headrace_operator.scheduling import shape_of
from headrace_operator.shortage import shortage

Body = Mapping[str, Any]


class NodeRoom:
    """The nodes of a cluster, from which pods go and to which they come as is forecast."""

    def __init__(
        self,
        deployment: DisaggDeployment,
        observed: Observed,
        templates: Mapping[tuple[str, str], RoleTemplate],
        census: Census,
    ) -> None:
        """`census`: all nodes and pods that there are; it is changed."""
        self._deployment = deployment
        self._owner = Owner.of(deployment)
        self._observed = observed
        self._templates = templates
        self._census = census
        own = [pod.name for pods in observed.groups.values() for pod in pods]
        self._bodies: dict[str, Body] = {name: observed.children["Pod", name] for name in own}

    def plan(self, states: Sequence[RoleState], now: float) -> NextStep:
        # Nobody's turn is waited for: others' pods that are about to get nodes are taken to have them.
        return next_step(states, self._companions(states, now), Capacity(rooms=tuple(self._census.rooms())))

    def settle(self, states: Sequence[RoleState], step: NextStep, now: float) -> list[RoleState]:
        left = {pod.name for state in states for pods in state.groups.values() for pod in pods}
        for name in self._bodies.keys() - left:
            self._census.lose_pod(self._bodies.pop(name))
        companions = self._companions([], now)
        pins = step.admission.pins if step.admission else {}
        for creation in (creation for plan in step.plans.values() for creation in plan.create):
            for pod in made(creation):
                body = companions.new_pod(creation, pod.index, pins.get(creation.key, Pins()))
                self._bodies[pod.name] = {**body, "metadata": {**body["metadata"], "uid": pod.uid}}
        for pod in (pod for state in states for pods in state.groups.values() for pod in pods if not pod.node):
            self._census.lose_pod(self._bodies[pod.name])  # which keeps room for it as long as it waits
        return [
            replace(state, groups={key: self._placed(key, pods, now) for key, pods in state.groups.items()})
            for state in states
        ]

    def _companions(self, states: Sequence[RoleState], now: float) -> Companions:
        others = {place: body for place, body in self._observed.children.items() if place[0] != "Pod"}
        observed = replace(
            self._observed,
            groups={key: pods for state in states for key, pods in state.groups.items()},
            children={**others, **{("Pod", name): body for name, body in self._bodies.items()}},
        )
        return Companions(self._deployment, self._owner, observed, self._templates, {}, now)

    def _placed(self, key: GroupKey, pods: Sequence[Pod], now: float) -> tuple[Pod, ...]:
        """The pods of a group: ready those that have a node, or find one now."""
        waiting = [pod for pod in pods if not pod.node and not pod.is_finished]
        if not waiting:
            return tuple(ready(pod, now) for pod in pods)
        rooms = self._census.rooms()
        group = GroupShape(shape_of(self._bodies[waiting[0].name]["spec"]), len(waiting))
        counts = fill(rooms, group.pod, group.num_pods)
        nodes = [room.node.name for room, count in zip(rooms, counts, strict=True) for _ in range(count)]
        after = {pod.name: ready(self._bound(pod, node), now) for pod, node in zip(waiting, nodes, strict=False)}
        if len(nodes) < len(waiting):
            trouble = _no_node(key, group, rooms)
            after |= {pod.name: self._stranded(pod, trouble, now) for pod in waiting[len(nodes) :]}
        return tuple(after[pod.name] if pod.name in after else ready(pod, now) for pod in pods)

    def _bound(self, pod: Pod, node: str) -> Pod:
        self._see(pod.name, {"nodeName": node}, {})
        return replace(pod, node=node)

    def _stranded(self, pod: Pod, trouble: Trouble, now: float) -> Pod:
        self._see(pod.name, {}, {"conditions": [{"type": "PodScheduled", "status": "False"}]})
        since = pod.unschedulable_since if pod.unschedulable_since is not None else now
        return replace(pod, unschedulable_since=since, trouble=trouble)

    def _see(self, name: str, spec: Body, status: Body) -> None:
        body = self._bodies[name]
        self._bodies[name] = {**body, "spec": {**body["spec"], **spec}, "status": status}
        self._census.see_pod(self._bodies[name])


def _no_node(key: GroupKey, group: GroupShape, rooms: Sequence[Room]) -> Trouble:
    """Why not all of these pods, which are there already, find nodes."""
    allotment = allot(Placement(), [Wish(key, group)], None, rooms)
    return Trouble(names.REASON_UNSCHEDULABLE, shortage(allotment, None, rooms))
