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
    by_state: Mapping[str, int]  # every state of GroupState


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
        roles[role.name] = RoleFigures(role.replicas or 0, role.updated_groups, role.failed_groups, by_state)
    return Figures(conditions, roles)
