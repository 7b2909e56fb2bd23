"""A deployment drawn for people: roles, groups, pods, where each pod sits, and what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic.alias_generators import to_camel

from headrace_operator.api_status import RoleStatus, Status
from headrace_operator.groups import GroupKey, GroupState, Pod, group_state
from headrace_operator.observe import Observed

DOMAIN_LABEL = "nvidia.com/gpu.clique"  # of nodes: what shares one NVLink domain
Body = Mapping[str, Any]


@dataclass(frozen=True)
class PodView:
    """One pod. `node` and `domain` are empty where they are not known."""

    name: str
    phase: str
    is_ready: bool
    node: str
    domain: str
    trouble: str


@dataclass(frozen=True)
class GroupView:
    """One group, or a slot that waits for one (no pods). `note`: why it was, or is to be, made again."""

    index: int
    revision: str
    is_updated: bool
    is_wanted: bool
    state: str
    note: str
    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class RoleView:
    """One role; `revision` is the wanted one."""

    name: str
    wanted: int
    ready: int
    revision: str
    groups: tuple[GroupView, ...]


def domain_label(body: Body) -> str:
    """The node label that tells a deployment's domains apart."""
    return str((body["spec"].get("placement") or {}).get("domainLabel") or DOMAIN_LABEL)


def picture(body: Body, observed: Observed, domains: Mapping[str, str]) -> list[RoleView]:
    """The roles of a deployment as the API server shows it. `domains`: domain by node."""
    status = Status.model_validate(body.get("status") or {})
    known = {role.name: role for role in status.roles}
    names = [role["name"] for role in body["spec"]["roles"]]
    names += sorted({key.role for key in observed.groups} - set(names))
    return [_role(name, known.get(name), status, observed, domains) for name in names]


def _role(
    name: str, role: RoleStatus | None, status: Status, observed: Observed, domains: Mapping[str, str]
) -> RoleView:
    wanted = (role.replicas or 0) if role else 0
    revision = role.revision if role else ""
    notes = {rebuild.group: rebuild.message for rebuild in status.rebuilds if rebuild.role == name}
    keys = sorted((key for key in observed.groups if key.role == name), key=lambda key: (key.index, key.revision))
    groups = [_group(key, revision, key.index < wanted, notes.get(key.index, ""), observed, domains) for key in keys]
    for index in sorted(set(range(wanted)) - {key.index for key in keys}):
        note = notes.get(index, "")
        groups.append(GroupView(index, "", False, True, GroupState.EMPTY.value, note, ()))
    groups.sort(key=lambda group: (group.index, group.revision))
    return RoleView(name, wanted, role.ready_groups if role else 0, revision, tuple(groups))


def _group(
    key: GroupKey, revision: str, is_wanted: bool, note: str, observed: Observed, domains: Mapping[str, str]
) -> GroupView:
    pods = observed.groups[key]
    template = observed.templates.get((key.role, key.revision))
    state = group_state(pods, template.parallelism.num_pods if template else None)
    return GroupView(
        index=key.index,
        revision=key.revision,
        is_updated=key.revision == revision,
        is_wanted=is_wanted,
        state=state.value,
        note="" if state is GroupState.READY else note,
        pods=tuple(_pod(pod, domains) for pod in pods),
    )


def _pod(pod: Pod, domains: Mapping[str, str]) -> PodView:
    trouble = f"{pod.trouble.reason}: {pod.trouble.message}" if pod.trouble else ""
    if pod.is_finished and pod.trouble:
        trouble = pod.trouble.message  # its reason speaks of the group: one end is no crash loop
    if pod.is_terminating:
        trouble = "is being deleted"
    is_ready = pod.is_ready and not pod.is_finished  # the condition may outlive the engine
    return PodView(pod.name, pod.phase, is_ready, pod.node, domains.get(pod.node, ""), trouble)


def as_data(roles: Iterable[RoleView]) -> list[dict[str, Any]]:
    """The roles as plain data, with names as in the resource's status."""
    return [_camel(asdict(role)) for role in roles]


def _camel(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {to_camel(key): _camel(item) for key, item in value.items()}
    return [_camel(item) for item in value] if isinstance(value, (list, tuple)) else value


def drawn(roles: Iterable[RoleView]) -> str:
    """The roles as a tree of text; ends with a line break."""
    return "\n".join(line.rstrip() for role in roles for line in _role_lines(role)) + "\n"


def _role_lines(role: RoleView) -> Iterator[str]:
    yield f"{role.name}  {role.ready}/{role.wanted} groups ready  revision {role.revision or '-'}"
    width = max((len(pod.name) for group in role.groups for pod in group.pods), default=0)
    for number, group in enumerate(role.groups, start=1):
        is_last = number == len(role.groups)
        yield f"{'└─' if is_last else '├─'} {_group_line(group)}"
        for place, pod in enumerate(group.pods, start=1):
            branch = "└─" if place == len(group.pods) else "├─"
            yield f"{'  ' if is_last else '│ '} {branch} {_pod_line(pod, width)}"


def _group_line(group: GroupView) -> str:
    parts = [f"group {group.index}", group.state]
    if group.revision and not group.is_updated:
        parts.append(f"old revision {group.revision}")
    if not group.is_wanted:
        parts.append("not wanted any more")
    if group.note:
        parts.append(group.note.partition("\n")[0])
    return "  ".join(parts)


def _pod_line(pod: PodView, width: int) -> str:
    state = "Ready" if pod.is_ready else pod.phase
    where = f"{pod.node or 'no node'}{f' ({pod.domain})' if pod.domain else ''}"
    return f"{pod.name.ljust(width)}  {state:<9}  {where}  {pod.trouble.partition(chr(10))[0]}"
