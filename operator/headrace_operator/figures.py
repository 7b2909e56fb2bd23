"""Numbers about each deployment for the metrics: its groups by state, how far a roll-out is, its conditions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_operator.api_status import Status
from headrace_operator.decide import Decision
from headrace_operator.groups import GroupState


@dataclass(frozen=True)
class RoleFigures:
    """Groups of one role."""

    wanted: int
    updated: int  # at the wanted revision
    failed: int  # given up
    without_room: int  # not made, because nothing has room for them
    short_gpus: int  # what those would take
    by_state: Mapping[str, int]  # every state of GroupState
    pressures: Mapping[str, float] = field(default_factory=dict)  # of mode Auto, by signal; none while not known
    load: float | None = None


@dataclass(frozen=True)
class Figures:
    """One deployment."""

    conditions: Mapping[str, bool]  # by type
    roles: Mapping[str, RoleFigures] = field(default_factory=dict)


def figures_of(status: Status, decision: Decision | None) -> Figures:
    """Figures after a pass; without a decision (the spec is not valid) only the conditions are known."""
    conditions = {condition.type: condition.status == "True" for condition in status.conditions}
    if decision is None:
        return Figures(conditions)
    roles = {}
    for role in status.roles:
        counts = Counter(group.state.value for slot in decision.plans[role.name].slots for group in slot.groups)
        by_state = {state.value: counts[state.value] for state in GroupState}
        known = decision.pressed.get(role.name)
        held = sum(key.role == role.name for key in decision.admission.held) if decision.admission else 0
        roles[role.name] = RoleFigures(
            wanted=role.replicas or 0,
            updated=role.updated_groups,
            failed=role.failed_groups,
            without_room=held,
            short_gpus=held * _gpus(decision, role.name),
            by_state=by_state,
            pressures={signal.name: signal.pressure for signal in known.signals} if known else {},
            load=known.load if known else None,
        )
    return Figures(conditions, roles)


def _gpus(decision: Decision, role_name: str) -> int:
    """GPUs of one group."""
    role = decision.deployment.spec.role(role_name)
    return role.parallelism.num_pods * (role.resources.gpu or 0) if role else 0
