"""What the planner reads: from the resource, what was observed, and what the status remembers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.groups import RoleState, Strategy
from headrace_operator.leeway import amount_of
from headrace_operator.memory import key_of, noted_rebuild
from headrace_operator.observe import Observed
from headrace_operator.retry import is_wanted, wishes
from headrace_operator.revision import RoleTemplate


def known_templates(
    deployment: DisaggDeployment, observed: Observed, engine_image: str
) -> tuple[dict[tuple[str, str], RoleTemplate], dict[str, str]]:
    """Templates by (role, revision), stored and wanted ones, and the wanted revision of each role.

    `engine_image`: the image of a wanted revision that names none and is not stored yet.
    """
    templates = dict(observed.templates)
    revisions: dict[str, str] = {}
    for role in deployment.spec.roles:
        template = RoleTemplate.of(deployment.spec, role.name)
        revisions[role.name] = template.revision
        templates.setdefault((role.name, template.revision), template.with_image(engine_image))
    return templates, revisions


def strategy_of(deployment: DisaggDeployment) -> Strategy:
    written = deployment.spec.rollout_strategy
    return Strategy(
        max_surge=amount_of(written.max_surge),
        max_unavailable=amount_of(written.max_unavailable),
        when_full=written.when_full,
        min_ready_seconds=float(written.min_ready_seconds),
        partition=written.partition,
        is_paused=deployment.spec.paused,
    )


def role_states(
    deployment: DisaggDeployment,
    observed: Observed,
    status: Status,
    templates: Mapping[tuple[str, str], RoleTemplate],
    revisions: Mapping[str, str],
) -> list[RoleState]:
    """What the planner reads: the roles of the spec in its order, then those that were removed from it."""
    return [
        _role_state(name, deployment, observed, status, templates, revisions)
        for name in _role_names(deployment, observed)
    ]


def _role_names(deployment: DisaggDeployment, observed: Observed) -> list[str]:
    wanted = [role.name for role in deployment.spec.roles]
    removed = sorted({key.role for key in observed.groups} - set(wanted))
    return [*wanted, *removed]


def _role_state(
    name: str,
    deployment: DisaggDeployment,
    observed: Observed,
    status: Status,
    templates: Mapping[tuple[str, str], RoleTemplate],
    revisions: Mapping[str, str],
) -> RoleState:
    role = deployment.spec.role(name)
    noted = [rebuild for rebuild in status.rebuilds if rebuild.role == name]
    wanted = wishes(deployment.metadata.annotations.get(names.ANNOTATION_RETRY, ""))
    own = {revision: template for (of, revision), template in templates.items() if of == name}
    present = {(key.role, key.revision) for key in observed.groups} | set(revisions.items())
    has_gpus = any(template.resources.num_gpus for place, template in templates.items() if place in present)
    return RoleState(
        role=name,
        revision=revisions.get(name, ""),
        replicas=role.replicas if role else 0,
        groups={key: pods for key, pods in observed.groups.items() if key.role == name},
        sizes={revision: template.parallelism.num_pods for revision, template in own.items()},
        rebuilds={key_of(rebuild): noted_rebuild(rebuild) for rebuild in noted},
        leaving=frozenset(key_of(group) for group in status.leaving if group.role == name),
        restarts=deployment.spec.restart_policy.as_rules(deployment.metadata.uid),
        retried=frozenset(key_of(rebuild) for rebuild in noted if is_wanted(rebuild, wanted)),
        loads={key: load for key, load in observed.loads.items() if key.role == name},
        fingerprints={revision: template.kv_fingerprint for revision, template in own.items()},
        costs={
            revision: template.parallelism.num_pods * template.resources.num_gpus for revision, template in own.items()
        }
        if has_gpus
        else {},
    )
