"""Plans that make only groups that can be made now: with room for them, and with every API that they ask for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_operator import names
from headrace_operator.admission import Admission, Capacity, admit
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_placement import Placement
from headrace_operator.api_status import Status
from headrace_operator.companions import Companions
from headrace_operator.groups import GroupKey, RoleState, Strategy, Trouble
from headrace_operator.planning import strategy_of
from headrace_operator.plans import Note, RolePlan
from headrace_operator.rollout import plan_deployment
from headrace_operator.upkeep import Admit


@dataclass(frozen=True)
class NextStep:
    """Plans of all roles, and what kept groups from being made."""

    plans: dict[str, RolePlan]
    admission: Admission | None  # None: room was not looked at
    missing: Trouble | None  # an API

    def news(self, status: Status) -> list[Note]:
        """An event when something begins to be missing; the numbers of a shortage may change every second, and are in
        the condition."""
        shortage = self.admission.shortage if self.admission else None
        trouble = self.missing or shortage
        told = next((c.reason for c in status.conditions if c.type == names.PROGRESSING), "")
        if trouble is None or told == trouble.reason:
            return []
        return [Note(trouble.reason, trouble.message, is_warning=True)]


@dataclass(frozen=True)
class _Planner:
    """Plans of one deployment without groups whose companions cannot be had."""

    states: Sequence[RoleState]
    strategy: Strategy
    companions: Companions

    def plan(self, admit: Admit = lambda key: None) -> dict[str, RolePlan]:
        plans = plan_deployment(self.states, self.strategy, self.companions.now, admit)
        return {role: self._with_companions(plan) for role, plan in plans.items()}

    def _with_companions(self, plan: RolePlan) -> RolePlan:
        troubles = {creation.key: self.companions.trouble(creation.key) for creation in plan.create}
        found = {key: trouble for key, trouble in troubles.items() if trouble}
        if not found:
            return plan
        plan = plan.without(found)
        return replace(plan, blocked=(*dict.fromkeys(found.values()), *plan.blocked))


def next_step(states: Sequence[RoleState], companions: Companions, capacity: Capacity | None) -> NextStep:
    """What to do next about all roles of a deployment. `capacity` None: room is not looked at.

    While an API is missing that the wanted groups ask for, no old group makes way for one that cannot be made.
    """
    deployment = companions.deployment
    strategy = strategy_of(deployment)
    missing = companions.missing(states)
    planner = _Planner(states, replace(strategy, is_paused=True) if missing else strategy, companions)
    placement = deployment.spec.placement
    if placement is None or capacity is None:
        return _step(deployment, planner.plan(), None, missing)
    plans, admission = _with_room(placement, planner, capacity)
    return _step(deployment, plans, admission, missing)


def _step(
    deployment: DisaggDeployment, plans: dict[str, RolePlan], admission: Admission | None, missing: Trouble | None
) -> NextStep:
    """The step, with the API that is missing told of where it keeps anything from being done."""
    if missing is None:
        return NextStep(plans, admission, None)
    is_needed = False
    for role, plan in plans.items():
        is_held = any(trouble.reason in (names.REASON_API_MISSING, names.REASON_PAUSED) for trouble in plan.blocked)
        blocked = [t for t in plan.blocked if t.reason != names.REASON_PAUSED or deployment.spec.paused]
        plans[role] = replace(plan, blocked=(*([missing] if is_held else []), *blocked))
        is_needed |= is_held
    return NextStep(plans, admission, missing if is_needed else None)


def _with_room(placement: Placement, planner: _Planner, capacity: Capacity) -> tuple[dict[str, RolePlan], Admission]:
    """Plans that make only groups for which there is room.

    What has no room is told to the planner, which may then replace a group in its place instead of beside it.
    """
    about = planner.companions

    def with_room(plans: Mapping[str, RolePlan]) -> Admission:
        return admit(placement, about.owner, plans, about.observed, about.templates, capacity, about.now)

    plans = planner.plan()
    admission = with_room(plans)
    shortage = admission.shortage
    if shortage is None:
        return dict(admission.plans), admission
    made = {creation.key for plan in admission.plans.values() for creation in plan.create}
    full = {
        (creation.key.role, creation.key.revision)
        for plan in plans.values()
        for creation in plan.create
        if creation.key not in made
    }

    def has_no_room(key: GroupKey) -> str | None:
        return shortage.message if (key.role, key.revision) in full and key not in made else None

    second = with_room(planner.plan(has_no_room))
    waits = [wait for wait in (admission.wait_seconds, second.wait_seconds) if wait is not None]
    made = {creation.key for plan in second.plans.values() for creation in plan.create}
    held = tuple(sorted({*admission.held, *second.held} - made))
    second = replace(second, held=held, shortage=second.shortage or shortage, wait_seconds=min(waits, default=None))
    return dict(second.plans), second
