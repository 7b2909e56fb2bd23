"""How pods of a group are made, and the objects beside them: which are wanted, and what keeps a group from them. Pure.

A ComputeDomain lives as long as its group: from its making, through its restarts, until its last pod is gone. The
object of a gang lives as long as pods that are in it. Then `children.py` finds them unwanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.gangs import Gang, gang_of, is_ignored, joins, new_gang
from headrace_operator.groups import GroupKey, RoleState, Trouble
from headrace_operator.observe import Observed
from headrace_operator.optional import GANG_KINDS
from headrace_operator.placement import Pins
from headrace_operator.plans import Creation, Note, RolePlan
from headrace_operator.render.companions import compute_domain
from headrace_operator.render.gangs import gang_object, ganged
from headrace_operator.render.nodes import avoiding, leaving_after, pinned
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import engine_pod
from headrace_operator.revision import RoleTemplate

Body = dict[str, Any]
Templates = Mapping[tuple[str, str], RoleTemplate]  # by (role, revision)


def needed_kinds(deployment: DisaggDeployment, observed: Observed) -> set[str]:
    """What may be missing in a cluster and is asked for, by wanted groups or by groups that exist."""
    wanted = [RoleTemplate.of(deployment.spec, role.name) for role in deployment.spec.roles]
    present = {(key.role, key.revision) for key in observed.groups} & observed.templates.keys()
    kinds = set().union(*(_own_kinds(template) for template in [*wanted, *(observed.templates[p] for p in present)]))
    return kinds.union(*(_gang_kinds(deployment, template) for template in wanted))


def _own_kinds(template: RoleTemplate) -> set[str]:
    return {names.COMPUTE_DOMAIN_KIND} if template.compute_domain else set()


def _gang_kinds(deployment: DisaggDeployment, template: RoleTemplate) -> set[str]:
    placement = deployment.spec.placement
    is_gang = placement is not None and joins(placement, template.parallelism.num_pods)
    return {GANG_KINDS[placement.gang]} if placement is not None and is_gang else set()


@dataclass(frozen=True)
class Companions:
    """The companions of one deployment's groups, as of one pass. `problems`: why kinds cannot be used, by kind."""

    deployment: DisaggDeployment
    owner: Owner
    observed: Observed
    templates: Templates
    problems: Mapping[str, str]
    now: float

    def gang(self, key: GroupKey) -> Gang | None:
        """The gang of a group: that of its pods, or of a group that is made now."""
        pods = self._pods(key)
        if pods:
            return gang_of(pods)
        num_pods = self.templates[key.role, key.revision].parallelism.num_pods
        return new_gang(self.deployment.spec.placement, self.owner, key, num_pods, self.now)

    @property
    def queue(self) -> str | None:
        placement = self.deployment.spec.placement
        return placement.queue if placement else None

    def wanted(self, role: str, plan: RolePlan) -> list[Body]:
        """Every companion that the role's groups should have after this step, kinds included that cannot be used."""
        with_pods = {key for key in self.observed.groups if key.role == role}
        alive = with_pods | {creation.key for creation in plan.create}
        bodies = [self._domain(key) for key in sorted(alive | {key for key, _ in plan.rebuilds})]
        bodies += [self._gang_object(key) for key in sorted(alive)]
        return [body for body in bodies if body is not None]

    def new_pod(self, creation: Creation, index: int, pins: Pins) -> Body:
        """Pod `index` of a group that is made now, tied to the nodes that were chosen for it and to its gang."""
        key = creation.key
        template = self.templates[key.role, key.revision]
        pod = pinned(engine_pod(self.owner, key, index, template), pins)
        gang = self.gang(key)
        if gang:
            pod = ganged(pod, gang, template.parallelism.num_pods, self.queue)
        node_loss_seconds = self.deployment.spec.restart_policy.node_loss_seconds
        return avoiding(leaving_after(pod, node_loss_seconds), creation.avoided_nodes)

    def warnings(self) -> list[Note]:
        """That a gang is none, where that shows: nothing would fail, and no one would know."""
        placement = self.deployment.spec.placement
        if placement is None or placement.gang != names.GANG_KUEUE:
            return []
        for key in sorted(self.observed.groups):
            if any(map(is_ignored, self._pods(key))):
                text = (
                    f"{key.role} group {key.index} is no gang: Kueue does not look at its pods; switch on its "
                    f"integration of plain pods for the namespace {self.owner.namespace}"
                )
                return [Note("GangIgnored", text, is_warning=True)]
        return []

    def trouble(self, key: GroupKey) -> Trouble | None:
        """What keeps a group that is to be made from getting its companions, if anything does."""
        template = self.templates[key.role, key.revision]
        gang = self.gang(key)
        for kind in sorted(_own_kinds(template) | ({GANG_KINDS[gang.kind]} if gang else set())):
            if kind in self.problems:
                return Trouble(names.REASON_API_MISSING, self.problems[kind])
        domain = self._domain(key)
        return self._obstacle(domain["kind"], domain["metadata"]["name"]) if domain else None

    def missing(self, states: Sequence[RoleState]) -> Trouble | None:
        """Of what groups of the wanted revisions ask for, something that cannot be used."""
        templates = [self.templates[state.role, state.revision] for state in states if state.revision]
        needed = set().union(*(_own_kinds(t) | _gang_kinds(self.deployment, t) for t in templates))
        kinds = sorted(needed & self.problems.keys())
        return Trouble(names.REASON_API_MISSING, self.problems[kinds[0]]) if kinds else None

    def _obstacle(self, kind: str, name: str) -> Trouble | None:
        if (kind, name) in self.observed.strangers:
            text = (
                f"{kind} {name} exists and belongs to someone else. What a deleted DisaggDeployment of this name has "
                "left goes by itself; otherwise delete it or rename the DisaggDeployment"
            )
            return Trouble(names.REASON_NAME_TAKEN, text)
        if self.observed.children.get((kind, name), {}).get("metadata", {}).get("deletionTimestamp"):
            text = f"{kind} {name} of the group that was here before is still being deleted"
            return Trouble(names.REASON_WAITING_FOR_COMPUTE_DOMAIN, text)
        return None

    def _pods(self, key: GroupKey) -> list[Mapping[str, Any]]:
        return [self.observed.children["Pod", pod.name] for pod in self.observed.groups.get(key, ())]

    def _domain(self, key: GroupKey) -> Body | None:
        template = self.templates.get((key.role, key.revision))
        if template is None:  # it cannot be read any more: what the group's pods may use stays
            name = names.group_name(self.owner.name, key.role, key.revision, key.index)
            return dict(self.observed.children.get((names.COMPUTE_DOMAIN_KIND, name), {})) or None
        return compute_domain(self.owner, key) if template.compute_domain else None

    def _gang_object(self, key: GroupKey) -> Body | None:
        gang = self.gang(key)
        if gang is None:
            return None
        template = self.templates.get((key.role, key.revision))
        num_pods = template.parallelism.num_pods if template else len(self._pods(key))
        return gang_object(self.owner, key, gang, num_pods, self.queue)
