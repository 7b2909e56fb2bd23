"""Whose pods may be made now, where pods of different sizes want the same nodes. Pure.

There may be room for all of them, and still the scheduler, which spreads, would put a small pod on each node and leave
none whole for the large ones. So pods of different sizes take turns: the next are made when those before have nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_operator.capacity import Room
from headrace_operator.scheduling import PodShape


def in_turn(wanted: Sequence[PodShape], unbound: Iterable[PodShape], rooms: Sequence[Room]) -> list[PodShape]:
    """Those of `wanted`, the first to go first, that meet no other pods on their way: neither `unbound` ones, which
    exist and are about to get nodes, nor those that go before them."""
    ahead = {shape: _nodes(shape, rooms) for shape in unbound}
    result = []
    for shape in wanted:
        nodes = _nodes(shape, rooms)
        if all(
            nodes.isdisjoint(others) or (other.requests == shape.requests and others == nodes)
            for other, others in ahead.items()
        ):
            result.append(shape)
        ahead[shape] = nodes
    return result


def _nodes(shape: PodShape, rooms: Sequence[Room]) -> frozenset[str]:
    """Nodes that such a pod may be on, be they full or not."""
    return frozenset(room.node.name for room in rooms if shape.objection(room.node) is None)
