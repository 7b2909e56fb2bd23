"""Which domain or node each group goes to, so that all of its pods find a place. Pure and deterministic.

Groups of a role are interchangeable, so they are counted, not tried one by one. The largest pods choose first, because
small ones fit between them later; every group goes where the least is left over, so that large room stays whole.

A deployment that must stay in one domain chooses it once, when it has no group: a domain with room for all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_operator.api_placement import Placement
from headrace_operator.capacity import (
    Demand,
    GroupShape,
    Room,
    domains,
    fill,
    num_groups,
    num_pods,
    pack,
    taken,
)
from headrace_operator.groups import GroupKey
from headrace_operator.scheduling import HOSTNAME


@dataclass(frozen=True)
class Wish:
    """A group that is to be made."""

    key: GroupKey
    shape: GroupShape


@dataclass(frozen=True)
class Pins:
    """Node labels that a group's pods are tied to, or, where not `is_required`, drawn to."""

    labels: tuple[tuple[str, str], ...] = ()
    is_required: bool = True


@dataclass(frozen=True)
class Scope:
    """What must be equal: `group_label` on all nodes of a group, `home_label` on all nodes of the deployment."""

    group_label: str | None
    home_label: str | None


@dataclass(frozen=True)
class Allotment:
    """Where groups go, and which must wait. `rooms`: what is left for those."""

    pins: Mapping[GroupKey, Pins]
    waiting: tuple[Wish, ...]
    scope: Scope  # the last one that was tried for those that wait
    rooms: tuple[Room, ...]


def scopes_of(placement: Placement) -> list[Scope]:
    """What to try, one after the other: just what is required, or from the most wanted to anywhere."""
    group_label = {"SameDomain": placement.domain_label, "SameNode": HOSTNAME}.get(placement.group)
    home_label = placement.domain_label if placement.deployment == "SameDomain" else None
    wanted = Scope(group_label, home_label)
    if placement.enforcement == "Required":
        return [wanted]
    return list(dict.fromkeys([wanted, Scope(group_label, None), Scope(None, None)]))


def allot(placement: Placement, wishes: Sequence[Wish], home: str | None, rooms: Sequence[Room]) -> Allotment:
    """Find a place for every wish. `home`: the domain that the deployment's groups are in already."""
    scopes = scopes_of(placement)
    allotter = _Allotter(rooms, home)
    waiting = list(wishes)
    for scope in scopes:
        allotter.allot(scope, waiting)
        waiting = [wish for wish in waiting if wish.key not in allotter.labels]
    is_required = placement.enforcement == "Required"
    return Allotment(
        pins={key: Pins(tuple(sorted(labels.items())), is_required) for key, labels in allotter.labels.items()},
        waiting=tuple(waiting),
        scope=scopes[-1],
        rooms=tuple(allotter.rooms.values()),
    )


@dataclass
class _Allotter:
    """The room that is left while groups are given theirs."""

    _given: Sequence[Room]
    home: str | None
    labels: dict[GroupKey, dict[str, str]] = field(default_factory=dict)  # what the group is pinned to

    def __post_init__(self) -> None:
        self.rooms = {room.node.name: room for room in self._given}

    def allot(self, scope: Scope, wishes: Sequence[Wish]) -> None:
        """Give room to those of `wishes` that find some in `scope`."""
        if not wishes:
            return
        if scope.home_label is None:
            self._allot_within(scope.group_label, {}, list(self.rooms.values()), wishes)
            return
        homes = domains(list(self.rooms.values()), scope.home_label)
        home = self.home if self.home is not None else self._tightest_home(scope, homes, wishes)
        if home is not None:
            self._allot_within(scope.group_label, {scope.home_label: home}, homes.get(home, []), wishes)

    def _tightest_home(self, scope: Scope, homes: Mapping[str, list[Room]], wishes: Sequence[Wish]) -> str | None:
        """The domain with the least room that still takes everything."""
        group_label = None if scope.group_label == scope.home_label else scope.group_label
        fitting = [home for home, rooms in homes.items() if _pack(wishes, rooms, group_label) is not None]
        largest = _largest_first(_by_shape(wishes), [room for home in fitting for room in homes[home]])[:1]
        return min(fitting, key=lambda home: (num_groups(homes[home], largest[0]), home), default=None)

    def _allot_within(
        self, group_label: str | None, base: Mapping[str, str], rooms: Sequence[Room], wishes: Sequence[Wish]
    ) -> None:
        if group_label in base:  # all rooms are in that one domain
            group_label = None
        packed = _pack(wishes, rooms, group_label) if group_label in (None, HOSTNAME) else None
        if packed is not None:
            for shape, members in _by_shape(wishes).items():
                self._settle(shape, members, base, packed[shape], group_label)
            return
        classes = _by_shape(wishes)
        for shape in _largest_first(classes, rooms):
            self._allot_class(shape, classes[shape], group_label, base, [room.node.name for room in rooms])

    def _allot_class(
        self,
        shape: GroupShape,
        wishes: Sequence[Wish],
        group_label: str | None,
        base: Mapping[str, str],
        names: Iterable[str],
    ) -> None:
        """Groups of one shape, each into the domain that has the least room left for such groups."""
        rooms = [self.rooms[name] for name in names]
        parts = domains(rooms, group_label) if group_label else {"": rooms}
        counts = {value: num_groups(members, shape) for value, members in parts.items()}
        chosen: dict[str, list[Wish]] = {}
        for wish in wishes:
            value = min((v for v, count in counts.items() if count), key=lambda v: (counts[v], v), default=None)
            if value is None:
                break
            counts[value] -= 1
            chosen.setdefault(value, []).append(wish)
        for value, members in chosen.items():
            counts_by_room = fill(parts[value], shape.pod, len(members) * shape.num_pods)
            labels = {**base, **({group_label: value} if group_label else {})}
            self._settle(shape, members, labels, _by_name(parts[value], counts_by_room), None)

    def _settle(
        self,
        shape: GroupShape,
        wishes: Sequence[Wish],
        labels: Mapping[str, str],
        pods_by_node: Mapping[str, int],
        group_label: str | None,
    ) -> None:
        """Note where these groups go, and take the room that their pods take. With a label to tell nodes apart by, each
        group is wholly on one of them."""
        nodes = [name for name, count in pods_by_node.items() for _ in range(count // shape.num_pods)]
        for index, wish in enumerate(wishes):
            own = {group_label: self.rooms[nodes[index]].node.labels[group_label]} if group_label else {}
            self.labels[wish.key] = {**labels, **own}
        for name, count in pods_by_node.items():
            self.rooms[name] = taken([self.rooms[name]], shape.pod, (count,))[0]


def _by_shape(wishes: Sequence[Wish]) -> dict[GroupShape, list[Wish]]:
    classes: dict[GroupShape, list[Wish]] = {}
    for wish in wishes:
        classes.setdefault(wish.shape, []).append(wish)
    return classes


def _largest_first(classes: Mapping[GroupShape, Sequence[Wish]], rooms: Sequence[Room]) -> list[GroupShape]:
    """Shapes of which the fewest pods fit first."""
    return sorted(classes, key=lambda s: (sum(num_pods(room, s.pod) for room in rooms), classes[s][0].key))


def _by_name(rooms: Sequence[Room], counts: Sequence[int]) -> dict[str, int]:
    return {room.node.name: count for room, count in zip(rooms, counts, strict=True) if count}


def _pack(
    wishes: Sequence[Wish], rooms: Sequence[Room], group_label: str | None
) -> dict[GroupShape, dict[str, int]] | None:
    """Places for all wishes at once, as pods by node name for each shape; with a label, of whole groups per node."""
    if group_label is not None:
        rooms = [room for room in rooms if group_label in room.node.labels]
    classes = _by_shape(wishes)
    demands = [
        Demand(shape.pod.times(shape.num_pods), len(members))
        if group_label
        else Demand(shape.pod, len(members) * shape.num_pods)
        for shape, members in classes.items()
    ]
    packed = pack(rooms, demands)
    if packed is None:
        return None
    return {
        shape: _by_name(rooms, [count * (shape.num_pods if group_label else 1) for count in counts])
        for shape, counts in zip(classes, packed, strict=True)
    }
