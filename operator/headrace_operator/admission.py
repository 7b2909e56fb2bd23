"""Which of the groups that a plan wants to make are made now, where they go, and which are taken back. Pure.

A group is made only if there is room for all of its pods where it may go. The scheduler has the last word: others' pods
may land in between, or a condition that is not looked at here may keep a pod out. So a group whose pods have not all
found a node after `PLACEMENT_LIMIT_SECONDS` is taken back whole, which frees what it holds, and is tried again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace_operator import names
from headrace_operator.api_placement import Placement
from headrace_operator.capacity import GroupShape, Room, num_pods
from headrace_operator.groups import GroupKey, GroupState, Pod, Rebuild, Trouble
from headrace_operator.observe import Observed
from headrace_operator.placement import Pins, Wish, allot, scopes_of
from headrace_operator.plans import Creation, Deletion, Group, Note, RolePlan
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import engine_pod
from headrace_operator.revision import RoleTemplate
from headrace_operator.scheduling import PodShape, shape_of
from headrace_operator.shortage import shortage
from headrace_operator.turns import in_turn
from headrace_operator.upkeep import BROKEN_GRACE_SECONDS

PLACEMENT_LIMIT_SECONDS = 60.0
# Those whose turn has not come are looked at again when pods get nodes; and after so long, if none was ever made.
TURN_SECONDS = 5.0

Templates = Mapping[tuple[str, str], RoleTemplate]  # by (role, revision)


@dataclass(frozen=True)
class Capacity:
    """What the cluster has left for one deployment's new groups."""

    rooms: tuple[Room, ...] = ()
    unbound: frozenset[PodShape] = frozenset()  # shapes of pods that are about to get nodes, any deployment's
    problem: str = ""  # why that is not known; empty: it is
    not_before: Mapping[GroupKey, float] = field(default_factory=dict)  # epoch seconds, of groups that were taken back


@dataclass(frozen=True)
class Claim:
    """Pods that are about to be made, and what they will need."""

    group: GroupKey
    pods: tuple[str, ...]  # names
    shape: PodShape  # with what ties them to the chosen nodes
    is_held: bool = False  # only made when others before them have nodes


@dataclass(frozen=True)
class Admission:
    """Plans with only the creations that have room."""

    plans: Mapping[str, RolePlan]
    pins: Mapping[GroupKey, Pins] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    taken_back: tuple[GroupKey, ...] = ()
    held: tuple[GroupKey, ...] = ()  # groups that are not made for lack of room
    shortage: Trouble | None = None  # why some groups are not made
    wait_seconds: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everything that is wanted is made."""
        return self.shortage is None and not any(claim.is_held for claim in self.claims)


def admit(
    placement: Placement,
    owner: Owner,
    plans: Mapping[str, RolePlan],
    observed: Observed,
    templates: Templates,
    capacity: Capacity,
    now: float,
) -> Admission:
    """The plans of all roles of one deployment, cut down to what there is room for."""
    creations = [creation for plan in plans.values() for creation in plan.create]
    shapes = _shapes(creations, owner, templates)
    pins: dict[GroupKey, Pins] = {}
    wishes, troubles = [], []
    for creation in creations:
        key, shape = creation.key, shapes[creation.key]
        if key in observed.groups:  # pods that are missing beside others: their room was looked for with the others'
            pins[key] = _pins_of_mates(placement, key, observed)
        elif capacity.problem:
            troubles.append(Trouble(names.REASON_CAPACITY_UNKNOWN, capacity.problem))
        elif capacity.not_before.get(key, 0.0) > now:
            message = f"{key.role} group {key.index} did not find a place for all of its pods; it is tried again later"
            troubles.append(Trouble(names.REASON_NO_CAPACITY, message))
        elif shape is None:
            pins[key] = Pins()  # the API server will refuse it, and say what is wrong with it
        else:
            wishes.append(Wish(key, GroupShape(shape, len(creation.pods))))
    if wishes:
        home = _home(placement, observed, capacity.rooms)
        allotment = allot(placement, wishes, home, capacity.rooms)
        pins |= allotment.pins
        if allotment.waiting:
            sentence = shortage(allotment, home, capacity.rooms)
            troubles.insert(0, Trouble(names.REASON_NO_CAPACITY, sentence))
    claims = _claims(owner, creations, shapes, pins)
    claims = _in_turn(claims, {wish.key for wish in wishes}, capacity)
    for claim in claims:
        if claim.is_held:
            del pins[claim.group]
    held = {creation.key for creation in creations} - pins.keys()
    waits = [capacity.not_before[key] - now for key in held if capacity.not_before.get(key, 0.0) > now]
    waits += [TURN_SECONDS] if any(claim.is_held for claim in claims) else []
    kept = {role: plan.without(held) for role, plan in plans.items()}
    taken_back, more_waits = _take_back(kept, now)
    return Admission(
        plans=kept,
        pins=pins,
        claims=tuple(claims),
        taken_back=tuple(taken_back),
        held=tuple(sorted(held)),
        shortage=troubles[0] if troubles else None,
        wait_seconds=min([*waits, *more_waits], default=None),
    )


def _shapes(creations: Sequence[Creation], owner: Owner, templates: Templates) -> dict[GroupKey, PodShape | None]:
    """Shape of the pods of every group that is to be made; None: the template is no valid pod."""
    by_template: dict[tuple[str, str], PodShape | None] = {}
    for creation in creations:
        place = (creation.key.role, creation.key.revision)
        if place not in by_template:
            try:
                by_template[place] = shape_of(engine_pod(owner, creation.key, 0, templates[place])["spec"])
            except ValueError:
                by_template[place] = None
    return {c.key: by_template[c.key.role, c.key.revision] for c in creations}


def _pins_of_mates(placement: Placement, key: GroupKey, observed: Observed) -> Pins:
    """What ties the pods of a group that are there already."""
    scope = scopes_of(placement)[0]
    wanted = {scope.group_label, scope.home_label}
    labels: dict[str, str] = {}
    for pod in observed.groups[key]:
        labels |= {label: value for label, value in _selector(observed, pod).items() if label in wanted}
    return Pins(tuple(sorted(labels.items())))


def _selector(observed: Observed, pod: Pod) -> Mapping[str, str]:
    spec = observed.children["Pod", pod.name].get("spec") or {}
    return spec.get("nodeSelector") or {}


def _home(placement: Placement, observed: Observed, rooms: Sequence[Room]) -> str | None:
    """The domain that most of the deployment's pods are in, or are tied to; None: it has none yet."""
    labels_of = {room.node.name: room.node.labels for room in rooms}
    label = placement.domain_label
    counts: Counter[str] = Counter()
    for pods in observed.groups.values():
        for pod in pods:
            value = labels_of.get(pod.node, {}).get(label) or _selector(observed, pod).get(label)
            if value and not pod.is_terminating:
                counts[value] += 1
    return min(counts, key=lambda value: (-counts[value], value), default=None)


def _claims(
    owner: Owner,
    creations: Sequence[Creation],
    shapes: Mapping[GroupKey, PodShape | None],
    pins: Mapping[GroupKey, Pins],
) -> list[Claim]:
    claims = []
    for creation in creations:
        key, shape = creation.key, shapes[creation.key]
        if shape is None or key not in pins:
            continue
        if pins[key].is_required:
            shape = shape.selecting(pins[key].labels)
        pods = tuple(names.pod_name(owner.name, key.role, key.revision, key.index, pod) for pod in creation.pods)
        claims.append(Claim(key, pods, shape))
    return claims


def _in_turn(claims: Sequence[Claim], groups: Collection[GroupKey], capacity: Capacity) -> list[Claim]:
    """The claims with those of `groups` held whose pods must let others go first: large pods before small ones."""
    totals = {claim.shape: sum(num_pods(room, claim.shape) for room in capacity.rooms) for claim in claims}
    ordered = sorted(totals, key=lambda shape: (totals[shape], repr(shape)))
    go = set(in_turn(ordered, capacity.unbound, capacity.rooms))
    return [
        claim if claim.group not in groups or claim.shape in go else replace(claim, is_held=True) for claim in claims
    ]


def _take_back(plans: dict[str, RolePlan], now: float) -> tuple[list[GroupKey], list[float]]:
    """Delete, in the plans, the groups that wait for a node for too long. Returns them, and how long others have."""
    keys: list[GroupKey] = []
    waits: list[float] = []
    for role, plan in plans.items():
        leaving = {deletion.pod_name for deletion in plan.delete}
        for group in (group for slot in plan.slots for group in slot.groups):
            since = _unschedulable_since(group)
            if since is None or any(pod.name in leaving for pod in group.pods):
                continue
            if now < since + PLACEMENT_LIMIT_SECONDS:
                waits.append(since + PLACEMENT_LIMIT_SECONDS - now)
                continue
            keys.append(group.key)
            plans[role] = _without_group(plans[role], group, now)
    return keys, waits


def _unschedulable_since(group: Group) -> float | None:
    """Epoch seconds since when a pod of the group finds no node; None: each has one, or is not looked at."""
    if group.state not in (GroupState.PARTIAL, GroupState.FORMING):
        return None
    return min((pod.unschedulable_since for pod in group.pods if pod.unschedulable_since is not None), default=None)


def _without_group(plan: RolePlan, group: Group, now: float) -> RolePlan:
    num_placed = sum(bool(pod.node) for pod in group.pods)
    waiting = next(pod for pod in group.pods if pod.unschedulable_since is not None)
    why = waiting.trouble.message if waiting.trouble else f"pod {waiting.name} found no node"
    text = (
        f"{group.key.role} group {group.key.index} is taken back: after {PLACEMENT_LIMIT_SECONDS:.0f} s {num_placed} "
        f"of {len(group.pods)} pods had a node; {why}"
    )
    noted = dict(plan.rebuilds)
    noted.setdefault(group.key, Rebuild(0, now, text))
    return replace(
        plan,
        create=tuple(creation for creation in plan.create if creation.key != group.key),
        delete=(*plan.delete, *(Deletion(pod.name, pod.uid, BROKEN_GRACE_SECONDS) for pod in group.pods)),
        rebuilds=tuple(sorted(noted.items())),
        notes=(*plan.notes, Note("GroupTakenBack", text, is_warning=True)),
    )
