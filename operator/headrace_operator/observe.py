"""From the API server's objects to the planner's data. Pure: dicts in, frozen data out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headrace_operator import names
from headrace_operator.compute_domains import waiting_for_domain
from headrace_operator.groups import GroupKey, Load, Pod
from headrace_operator.pod_facts import pod_facts
from headrace_operator.revision import RoleTemplate
from headrace_operator.signals import Sample

Body = Mapping[str, Any]
Place = tuple[GroupKey, int]  # a pod's group, and its index there


@dataclass(frozen=True)
class Observed:
    """A deployment's children, by (kind, name). `strangers` bear our labels but have another owner, or none."""

    children: Mapping[tuple[str, str], Body]
    strangers: frozenset[tuple[str, str]]
    groups: Mapping[GroupKey, tuple[Pod, ...]]
    templates: Mapping[tuple[str, str], RoleTemplate]  # by (role, revision)
    misnamed: tuple[Pod, ...] = field(default=())  # made by someone else in our deployment's name
    loads: Mapping[GroupKey, Load] = field(default_factory=dict)  # what engines said that were asked
    samples: Mapping[GroupKey, Sample] | None = None  # how serving groups are; None: none has been asked yet
    # (kind, name, uid) of strangers that a deployment of the same name owned which is gone, as its name is taken
    leftovers: tuple[tuple[str, str, str], ...] = ()

    @property
    def foreign(self) -> frozenset[tuple[str, str]]:
        """(kind, name) of the strangers that are left alone."""
        return self.strangers - {(kind, name) for kind, name, _ in self.leftovers}

    def leader_address(self, key: GroupKey) -> str:
        """Where the engine of a group that has pods answers, host:port."""
        address = self.groups[key][0].address
        return f"[{address}]:{names.PORT_HTTP}" if ":" in address else f"{address}:{names.PORT_HTTP}"


class ParsedPods:
    """What was made of the pods of one deployment, for as long as their resourceVersion stays.

    Of a thousand pods a pass finds a few changed; to parse them all would take most of its time.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Place | None, Pod]] = {}  # by uid
        self._seen: dict[str, tuple[str, Place | None, Pod]] = {}

    def of(self, body: Body) -> tuple[Place | None, Pod]:
        """Where a pod belongs (None: its name is none that we give) and what is known of it."""
        uid, version = body["metadata"]["uid"], body["metadata"]["resourceVersion"]
        known = self._known.get(uid)
        if known is None or known[0] != version:
            place = place_of(body)
            known = (version, place, pod_facts(body, place[1] if place else 0))
        self._seen[uid] = known
        return known[1], known[2]

    def forget_unseen(self) -> None:
        """Keep only the pods that were asked for since the last time."""
        self._known, self._seen = self._seen, {}


def observe(deployment: str, uid: str, objects: Iterable[Body], parsed: ParsedPods | None = None) -> Observed:
    """Sort the objects that are labelled as `deployment`'s; only those whose controller is `uid` are its children.

    `parsed`: kept by the caller from pass to pass; it changes nothing but the time that this takes."""
    parsed = parsed or ParsedPods()
    children: dict[tuple[str, str], Body] = {}
    strangers: set[tuple[str, str]] = set()
    leftovers = []
    for body in objects:
        key = (body["kind"], body["metadata"]["name"])
        if controller_uid(body) == uid:
            children[key] = body
        elif body["kind"] != "Pod" or names.LABEL_GROUP in _labels(body):  # the router's pods are its Deployment's
            strangers.add(key)
            if _is_leftover(deployment, body):
                leftovers.append((*key, str(body["metadata"]["uid"])))
    domains = {name: body for (kind, name), body in children.items() if kind == names.COMPUTE_DOMAIN_KIND}
    groups: dict[GroupKey, list[Pod]] = {}
    misnamed = []
    for (kind, _), body in children.items():
        if kind != "Pod":
            continue
        place, pod = parsed.of(body)
        if place is None:
            misnamed.append(pod)
            continue
        group = place[0]
        if domains:
            own = names.group_name(deployment, group.role, group.revision, group.index)
            pod = waiting_for_domain(pod, domains.get(own))
        groups.setdefault(group, []).append(pod)
    parsed.forget_unseen()
    return Observed(
        children=children,
        strangers=frozenset(strangers),
        groups={key: tuple(sorted(pods, key=lambda pod: pod.index)) for key, pods in groups.items()},
        templates=_templates(children),
        misnamed=tuple(misnamed),
        leftovers=tuple(leftovers),
    )


def controller_uid(body: Body) -> str | None:
    """uid of the object that controls this one."""
    for reference in body["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference.get("uid"))
    return None


def _is_leftover(deployment: str, body: Body) -> bool:
    """Whether a deployment of this name owned an object that is not ours, and it is not being deleted yet."""
    return is_of_name(deployment, body) and "deletionTimestamp" not in body["metadata"]


def is_of_name(deployment: str, body: Body) -> bool:
    """Whether a deployment of this name owns the object, or owned it."""
    owners = [reference for reference in body["metadata"].get("ownerReferences") or () if reference.get("controller")]
    return any(owner.get("kind") == names.KIND and owner.get("name") == deployment for owner in owners)


def _labels(body: Body) -> Mapping[str, str]:
    return body["metadata"].get("labels") or {}


def place_of(body: Body) -> Place | None:
    """Where a pod belongs; None: its name is none that we give."""
    found = names.place_of_pod(body["metadata"]["name"])
    if found is None:
        return None
    role, revision, group, pod = found
    return GroupKey(role, revision, group), pod


def _templates(children: Mapping[tuple[str, str], Body]) -> dict[tuple[str, str], RoleTemplate]:
    """Stored templates that can still be read; groups of others cannot be made again, only replaced."""
    templates = {}
    for (kind, _), body in children.items():
        if kind != "ControllerRevision":
            continue
        place = names.place_of_revision(body["metadata"]["name"])
        try:
            templates[place] = RoleTemplate.model_validate(body.get("data"), extra="ignore")
        except ValidationError:
            continue
    return templates
