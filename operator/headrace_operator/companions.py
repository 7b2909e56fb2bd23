"""Objects beside the pods of single groups: which are wanted, and what keeps a group from getting its own. Pure.

A group's companions live as long as the group: from the moment it is made, through its restarts, until its last pod is
gone. Then `children.py` finds them unwanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.groups import GroupKey, Trouble
from headrace_operator.observe import Observed
from headrace_operator.plans import RolePlan
from headrace_operator.render.companions import compute_domain
from headrace_operator.render.objects import Owner
from headrace_operator.revision import RoleTemplate

Body = dict[str, Any]
Templates = Mapping[tuple[str, str], RoleTemplate]  # by (role, revision)


def needed_kinds(deployment: DisaggDeployment, observed: Observed) -> set[str]:
    """Kinds of companions that wanted groups ask for, or groups that exist."""
    wanted = [RoleTemplate.of(deployment.spec, role.name) for role in deployment.spec.roles]
    present = {(key.role, key.revision) for key in observed.groups} & observed.templates.keys()
    return set().union(*(kinds_of(template) for template in [*wanted, *(observed.templates[p] for p in present)]))


def companions(
    owner: Owner,
    role: str,
    plan: RolePlan,
    observed: Observed,
    templates: Templates,
    problems: Mapping[str, str],
) -> list[Body]:
    """Every companion that the role's groups should have after this step, but for kinds that cannot be used."""
    with_pods = {key for key in observed.groups if key.role == role}
    keys = with_pods | {creation.key for creation in plan.create} | {key for key, _ in plan.rebuilds}
    wanted = [body for key in sorted(keys) for body in _of_group(owner, key, templates)]
    return [body for body in wanted if body["kind"] not in problems] + [
        dict(body)
        for (kind, _), body in sorted(observed.children.items())
        if kind == names.COMPUTE_DOMAIN_KIND and _is_unexplained(body, with_pods, templates)
    ]


def kinds_of(template: RoleTemplate) -> set[str]:
    """Kinds of the companions of its groups."""
    return {names.COMPUTE_DOMAIN_KIND} if template.compute_domain else set()


def obstacle(owner: Owner, key: GroupKey, observed: Observed, templates: Templates) -> Trouble | None:
    """What keeps the companions of a group that is to be made from being its own, if anything does."""
    for body in _of_group(owner, key, templates):
        place = (body["kind"], body["metadata"]["name"])
        if place in observed.strangers:
            text = (
                f"{place[0]} {place[1]} exists and belongs to someone else. What a deleted DisaggDeployment of this "
                "name has left goes by itself; otherwise delete it or rename the DisaggDeployment"
            )
            return Trouble(names.REASON_NAME_TAKEN, text)
        if observed.children.get(place, {}).get("metadata", {}).get("deletionTimestamp"):
            text = f"{place[0]} {place[1]} of the group that was here before is still being deleted"
            return Trouble(names.REASON_WAITING_FOR_COMPUTE_DOMAIN, text)
    return None


def _of_group(owner: Owner, key: GroupKey, templates: Templates) -> list[Body]:
    template = templates.get((key.role, key.revision))
    return [compute_domain(owner, key)] if template and template.compute_domain else []


def _is_unexplained(body: Mapping[str, Any], with_pods: set[GroupKey], templates: Templates) -> bool:
    """Whether it belongs to a group with pods whose template cannot be read any more: they may still use it."""
    labels = body["metadata"]["labels"]
    place = (labels.get(names.LABEL_ROLE), labels.get(names.LABEL_REVISION))
    return place not in templates and any(
        (key.role, key.revision) == place and str(key.index) == labels.get(names.LABEL_GROUP) for key in with_pods
    )
