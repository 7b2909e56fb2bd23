"""How many pods and whole groups fit on which nodes. Pure arithmetic over what nodes have left.

Pods of one shape are interchangeable, so counting them is exact: a node takes as many as its scarcest resource allows.
Several shapes at once are a packing problem. `pack` first fills the tightest nodes with the largest pods, which never
takes more than there is but may miss a packing; then it searches, as long as that is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headrace_operator.scheduling import Amounts, Node, PodShape

# Nodes times states of a search: about a tenth of a second of work.
_MAX_SEARCH = 10_000

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """A node with what it has left. `free` may be below zero where more was bound than a node (now) has."""

    node: Node
    free: Amounts

    def without(self, shape: PodShape, count: int) -> Room:
        """What is left when `count` such pods are there too."""
        taken = dict(shape.requests)
        names = self.free.keys() | taken.keys()
        return Room(self.node, {name: self.free.get(name, 0) - count * taken.get(name, 0) for name in names})


@dataclass(frozen=True)
class GroupShape:
    """A group: equal pods that are of use only all together."""

    pod: PodShape
    num_pods: int


@dataclass(frozen=True)
class Demand:
    """Pods that need a place."""

    shape: PodShape
    count: int


def num_pods(room: Room, shape: PodShape) -> int:
    """How many such pods the node takes."""
    if shape.objection(room.node) is not None:
        return 0
    return _fitting(room.free, shape)


def num_groups(rooms: Sequence[Room], group: GroupShape) -> int:
    """How many whole groups fit on these nodes, their pods anywhere among them."""
    return sum(num_pods(room, group.pod) for room in rooms) // group.num_pods


def _fitting(free: Mapping[str, int], shape: PodShape) -> int:
    return max(0, min(free.get(name, 0) // amount for name, amount in shape.requests))


def domains(rooms: Sequence[Room], label: str) -> dict[str, list[Room]]:
    """Nodes by the value of a label, in the order of the values; nodes without the label are in none."""
    found: dict[str, list[Room]] = {}
    for room in rooms:
        value = room.node.labels.get(label)
        if value is not None:
            found.setdefault(value, []).append(room)
    return dict(sorted(found.items()))


def fill(rooms: Sequence[Room], shape: PodShape, count: int) -> Counts:
    """Where up to `count` pods of one shape go, as counts by room: the tightest nodes first, so that large room stays
    whole. Sums up to less than `count` where there is no more room."""
    fitting = [num_pods(room, shape) for room in rooms]
    counts = [0] * len(rooms)
    for index in sorted(range(len(rooms)), key=lambda i: (fitting[i], i)):
        counts[index] = min(fitting[index], count)
        count -= counts[index]
    return tuple(counts)


def taken(rooms: Sequence[Room], shape: PodShape, counts: Counts) -> list[Room]:
    """The rooms with `counts[i]` more such pods in room i."""
    return [room.without(shape, count) if count else room for room, count in zip(rooms, counts, strict=True)]


def pack(rooms: Sequence[Room], demands: Sequence[Demand]) -> list[Counts] | None:
    """A place for all pods of all demands, as counts by room for each demand; None: none was found."""
    totals = [sum(num_pods(room, demand.shape) for room in rooms) for demand in demands]
    if any(total < demand.count for total, demand in zip(totals, demands, strict=True)):
        return None
    in_turn = _pack_in_turn(rooms, demands, totals)
    if in_turn is not None or len(demands) == 1:
        return in_turn
    # The demand with the most pods goes last: its count is no dimension of the search.
    order = sorted(range(len(demands)), key=lambda i: demands[i].count)
    ordered = [demands[i] for i in order]
    if len(rooms) * prod(demand.count + 1 for demand in ordered[:-1]) > _MAX_SEARCH:
        return None
    found = _pack_exactly(rooms, ordered)
    if found is None:
        return None
    by_demand = dict(zip(order, found, strict=True))
    return [by_demand[i] for i in range(len(demands))]


def _pack_in_turn(rooms: Sequence[Room], demands: Sequence[Demand], totals: Sequence[int]) -> list[Counts] | None:
    """One demand after the other, first those of which the fewest pods fit (`totals`)."""
    left = list(rooms)
    result: dict[int, Counts] = {}
    for index in sorted(range(len(demands)), key=lambda i: (totals[i], i)):
        demand = demands[index]
        counts = fill(left, demand.shape, demand.count)
        if sum(counts) < demand.count:
            return None
        left = taken(left, demand.shape, counts)
        result[index] = counts
    return [result[i] for i in range(len(demands))]


def _pack_exactly(rooms: Sequence[Room], demands: Sequence[Demand]) -> list[Counts] | None:
    """Node by node: for every number of pods still to be placed of all demands but the last, the least that can remain
    of the last. Each step keeps where it came from, so that the places can be read back from the end."""
    start = tuple(demand.count for demand in demands)
    best: dict[Counts, int] = {start[:-1]: start[-1]}
    steps: list[dict[Counts, tuple[Counts, Counts]]] = []  # by what remains after the room: what remained, what it took
    for room in rooms:
        after: dict[Counts, int] = {}
        step: dict[Counts, tuple[Counts, Counts]] = {}
        shapes = [demand.shape if demand.shape.objection(room.node) is None else None for demand in demands]
        for before, last in best.items():
            for took in _loads(room.free, shapes, (*before, last)):
                remains = tuple(b - t for b, t in zip(before, took, strict=False))
                if last - took[-1] < after.get(remains, last + 1):
                    after[remains] = last - took[-1]
                    step[remains] = (before, took)
        best = after
        steps.append(step)
    remains = (0,) * (len(demands) - 1)
    if best.get(remains) != 0:
        return None
    loads = []
    for step in reversed(steps):
        remains, took = step[remains]
        loads.append(took)
    return [tuple(took[i] for took in reversed(loads)) for i in range(len(demands))]


def _loads(free: Mapping[str, int], shapes: Sequence[PodShape | None], most: Counts) -> Iterator[Counts]:
    """What one node may take: every count of all shapes but the last, and then as many as possible of the last."""
    shape, *others = shapes
    limit = min(most[0], _fitting(free, shape)) if shape else 0
    if not others:
        yield (limit,)
        return
    for count in range(limit + 1):
        left = {name: free.get(name, 0) for name in free}
        for name, amount in shape.requests if shape else ():
            left[name] = free.get(name, 0) - count * amount
        for rest in _loads(left, others, most[1:]):
            yield (count, *rest)
