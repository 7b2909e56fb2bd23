"""Voluntary disruptions (`kubectl drain`, a node that is to be updated): one group of a role, one router. Pure.

An eviction takes one pod, and with it the group. So the budget lets one pod of a role go while all its groups are
whole, and no other until the group is back: its siblings are not ready meanwhile, which uses the budget up. Counting
whole groups instead (all but one group's pods must stay) would let as many pods of different groups go at once as a
group has. A role of a single group has no budget: any would block every drain for ever. Nor has a single router.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_operator import names
from headrace_operator.api import DisaggDeployment, Role, Router
from headrace_operator.plans import RolePlan


def num_guarded(role: Role, plan: RolePlan) -> int:
    """Groups that a budget can count on: those that were given up are not coming back by themselves."""
    return role.replicas - sum(noted.is_final for _, noted in plan.rebuilds)


def min_available(role: Role, plan: RolePlan, pods_per_group: int) -> int | None:
    """Pods of the role that must stay; None: it gets no budget."""
    num_groups = num_guarded(role, plan)
    return num_groups * pods_per_group - 1 if num_groups > 1 else None


def is_guarded(router: Router) -> bool:
    """Whether the router's pods get a budget."""
    return router.replicas > 1


def protection(deployment: DisaggDeployment, plans: Mapping[str, RolePlan]) -> tuple[bool, str, str]:
    """The condition Protected: whether it holds, its reason, its message."""
    spec = deployment.spec
    single = [role.name for role in spec.roles if num_guarded(role, plans[role.name]) == 1]
    if single:
        which = " and ".join(single)
        text = f"{which}: one group, so no PodDisruptionBudget; draining its node interrupts what it serves"
        return False, names.REASON_SINGLE_GROUP, text
    if spec.router.replicas == 1:
        text = "router: one pod, so no PodDisruptionBudget; draining its node leaves the endpoint away until it is back"
        return False, names.REASON_SINGLE_ROUTER, text
    return True, names.REASON_BUDGETED, "draining nodes takes out one group of a role and one router at a time"
