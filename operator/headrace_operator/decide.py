"""One deployment's next step: what to apply, what to delete, and what to say. Pure.

Reads the parsed resource and what was observed; never asks the API server. `reconcile.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_operator import names
from headrace_operator.admission import Admission, Capacity
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_scaling import EXTERNAL
from headrace_operator.api_status import AutoScalingStatus, Status
from headrace_operator.children import Application, ChildDeletion, applications_of, unwanted
from headrace_operator.companions import Companions
from headrace_operator.disruptions import min_available
from headrace_operator.drain import Drains, plan_drains
from headrace_operator.feasible import next_step
from headrace_operator.groups import GroupKey, Trouble
from headrace_operator.history import number_of
from headrace_operator.observe import Observed
from headrace_operator.placement import Pins
from headrace_operator.planning import known_templates, role_states
from headrace_operator.plans import Deletion, Note, RolePlan
from headrace_operator.pressure import Pressed
from headrace_operator.render.budgets import role_budget
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import PodIdentity
from headrace_operator.render.router import router_objects
from headrace_operator.render.scaler import role_scaler
from headrace_operator.render.services import controller_revision, role_service
from headrace_operator.revision import RoleTemplate
from headrace_operator.scaling import scaled, seed

Body = dict[str, Any]


@dataclass(frozen=True)
class Defaults:
    """Images for resources that name none."""

    engine_image: str
    router_image: str


@dataclass(frozen=True)
class Decision:
    """The next step of one deployment; nothing in it means that it is as wanted."""

    deployment: DisaggDeployment  # with the numbers of groups that are wanted now
    cuts: tuple[str, ...]  # wishes for groups that are not granted
    autoscaling: AutoScalingStatus | None  # what the status says of mode Auto
    pressed: Mapping[str, Pressed | None]  # by role, in mode Auto
    plans: Mapping[str, RolePlan]  # by role, in the spec's order; removed roles too
    revisions: Mapping[str, str]  # wanted revision by role
    apply: tuple[Application, ...]
    delete_pods: tuple[Deletion, ...]
    delete_children: tuple[ChildDeletion, ...]
    notes: tuple[Note, ...]
    repairs: tuple[Note, ...]  # one for each application that is not new
    drains: Drains  # what comes before some deletions
    taken: tuple[str, ...]  # "Kind name" of wanted objects that belong to someone else
    admission: Admission | None = None  # what there was room for; None: nobody asked for it to be looked at
    held_back: tuple[str, ...] = ()  # "Kind name" of edited children that are left as they are for now

    def without_repairs(self) -> Decision:
        """The same, with edited children left as they are."""
        edited = sorted(f"{a.body['kind']} {a.body['metadata']['name']}" for a in self.apply if not a.is_new)
        return replace(self, apply=tuple(a for a in self.apply if a.is_new), repairs=(), held_back=tuple(edited))

    def applies(self, kind: str) -> bool:
        """Whether an object of this kind is not yet what it should be."""
        return any(application.body["kind"] == kind for application in self.apply)

    @property
    def is_rolling_out(self) -> bool:
        """Whether groups of other than the wanted revisions are still there."""
        return any(
            revision != self.revisions.get(role)
            for role, plan in self.plans.items()
            for revision in (*(slot.holder.revision for slot in plan.slots), *(key.revision for key in plan.leaving))
        )

    @property
    def wait_seconds(self) -> float | None:
        waits = [*(plan.wait_seconds for plan in self.plans.values()), self.drains.wait_seconds]
        waits.append(self.admission.wait_seconds if self.admission else None)
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def shortage(self) -> Trouble | None:
        """Why some groups that are wanted are not made now."""
        return self.admission.shortage if self.admission else None


def decide(
    deployment: DisaggDeployment,
    observed: Observed,
    status: Status,
    defaults: Defaults,
    now: float,
    capacity: Capacity | None = None,
    problems: Mapping[str, str] | None = None,
) -> Decision:
    """The next step towards `deployment`, from what was observed and noted in its status.

    `capacity`: what a deployment with a placement may use of the cluster; None (a preview): as much as it likes.
    `problems`: why optional kinds that it asks for cannot be used, by kind."""
    owner = Owner.of(deployment)
    scaling = scaled(deployment, observed, status, now)
    deployment = scaling.deployment
    templates, revisions = known_templates(deployment, observed, defaults.engine_image)
    states = role_states(deployment, observed, status, templates, revisions)
    companions = Companions(deployment, owner, observed, templates, problems or {}, now)
    step = next_step(states, companions, capacity)
    plans, admission = step.plans, step.admission
    pins = admission.pins if admission else {}
    wanted = _wanted_objects(companions, revisions, plans, pins, defaults)
    desired = {(body["kind"], body["metadata"]["name"]): body for body in wanted}
    usable = [body for body in wanted if body["kind"] not in companions.problems]
    applications, repairs = applications_of(usable, observed)
    drains = plan_drains(
        observed.groups,
        [deletion for plan in plans.values() for deletion in plan.delete],
        observed.loads,
        deployment.spec.drain_timeout_seconds,
        now,
    )
    return Decision(
        deployment=deployment,
        cuts=scaling.cuts,
        autoscaling=scaling.autoscaling,
        pressed=scaling.pressed,
        plans=plans,
        revisions=revisions,
        apply=tuple(applications),
        delete_pods=(
            *drains.delete,
            *(Deletion(pod.name, pod.uid, None) for pod in observed.misnamed if not pod.is_terminating),
        ),
        delete_children=(
            *unwanted(observed, desired, revisions),
            *(ChildDeletion(*leftover) for leftover in observed.leftovers),
        ),
        notes=(
            *scaling.notes,
            *(note for plan in plans.values() for note in plan.notes),
            *step.news(status),
            *companions.warnings(),
        ),
        repairs=tuple(repairs),
        drains=drains,
        taken=tuple(f"{kind} {name}" for kind, name in sorted(desired) if (kind, name) in observed.foreign),
        admission=admission,
    )


def _wanted_objects(
    companions: Companions,
    revisions: Mapping[str, str],
    plans: Mapping[str, RolePlan],
    pins: Mapping[GroupKey, Pins],
    defaults: Defaults,
) -> list[Body]:
    """Every object that should exist after this step, those first that others need; of the pods that are kept only
    those that lack labels or annotations."""
    deployment, owner = companions.deployment, companions.owner
    templates, observed = companions.templates, companions.observed
    bodies: list[Body] = []
    pods: list[Body] = []
    leaving = {deletion.pod_name for plan in plans.values() for deletion in plan.delete}
    for role, plan in plans.items():
        in_use = {key.revision for key in observed.groups if key.role == role}
        in_use |= {key.revision for key, _ in plan.rebuilds} | {revisions.get(role, "")}
        for revision in sorted(in_use):
            template = templates.get((role, revision))
            if template:
                stored = observed.children.get(("ControllerRevision", names.revision_name(owner.name, role, revision)))
                others = [
                    body
                    for (kind, name), body in observed.children.items()
                    if kind == "ControllerRevision" and names.place_of_revision(name)[0] == role
                ]
                is_wanted = revision == revisions.get(role)
                number = number_of(stored, others, is_wanted, deployment.metadata.generation)
                bodies.append(controller_revision(owner, role, revision, template, number))
        wanted = deployment.spec.role(role)
        if wanted:
            bodies.append(role_service(owner, role))
            guarded = min_available(wanted, plan, wanted.parallelism.num_pods)
            if guarded is not None:
                bodies.append(role_budget(owner, role, guarded))
            if deployment.spec.scaling.mode == EXTERNAL:
                bodies.append(role_scaler(owner, role, seed(wanted.replicas)))
        bodies += companions.wanted(role, plan)
        for creation in plan.create:
            pin = pins.get(creation.key, Pins())
            pods += [companions.new_pod(creation, index, pin) for index in creation.pods]
        pods += _identity_repairs(owner, role, observed, templates, leaving)
    return [*bodies, *pods, *router_objects(owner, deployment.spec, defaults.router_image)]


def _identity_repairs(
    owner: Owner,
    role: str,
    observed: Observed,
    templates: Mapping[tuple[str, str], RoleTemplate],
    leaving: Collection[str],
) -> list[Body]:
    """What gives the pods of a role that stay the labels and annotations back that they have lost."""
    identities = {
        revision: PodIdentity(owner, role, revision, template)
        for (of, revision), template in templates.items()
        if of == role
    }
    return [
        identities[key.revision].of(key.index, pod.index)
        for key, members in observed.groups.items()
        if key.role == role and key.revision in identities
        for pod in members
        if not (pod.is_terminating or pod.name in leaving)
        and not identities[key.revision].is_on(observed.children["Pod", pod.name], key.index, pod.index)
    ]
