"""What all groups of a deployment may cost together while some of them are surplus. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_operator.groups import RoleState


def cost_of(state: RoleState, revision: str) -> int:
    """GPUs of a group, or its pods where nothing asks for GPUs."""
    return state.costs.get(revision, state.sizes.get(revision, 1))


@dataclass
class Budget:
    """Kept through one pass over all roles."""

    is_shrinking: bool
    budget: int
    used: int
    unit: str
    is_owed: bool = False  # slots wait for their groups

    @classmethod
    def of(cls, states: Sequence[RoleState], is_shrinking: bool) -> Budget:
        return cls(
            is_shrinking=is_shrinking,
            budget=sum(state.replicas * cost_of(state, state.revision) for state in states),
            used=sum(cost_of(state, key.revision) for state in states for key in state.groups),
            unit="GPUs" if any(state.costs for state in states) else "pods",
        )

    def has(self, cost: int) -> bool:
        return not self.is_shrinking or self.used + cost <= self.budget

    def shortage(self, cost: int) -> str:
        return f"it needs {cost} {self.unit}, and {self.used} of {self.budget} are in use"
