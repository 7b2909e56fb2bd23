"""What nodes have and what is taken of it, kept up to date object by object. Pure bookkeeping; no client, no clock.

Every pod that is bound to a node and has not ended takes what it requests, whoever made it. Of pods that are not bound
yet only our own count: they are meant for room that was looked for, so it is not given out twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_operator import names
from headrace_operator.capacity import Room, fill, taken
from headrace_operator.scheduling import Node, PodShape, node_of, requests_of, shape_of

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Occupant:
    """A pod that takes room, or will. `shape`: of ours that have no node yet."""

    namespace: str
    name: str
    node: str
    requests: tuple[tuple[str, int], ...] = ()
    shape: PodShape | None = None
    is_in_line: bool = False  # the scheduler has yet to look at it


class Census:
    """All nodes and pods of the cluster, as far as they matter for room."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._occupants: dict[str, Occupant] = {}  # by uid
        self._used: dict[str, Counter[str]] = {}  # by node
        self._uids: dict[tuple[str, str], str] = {}  # of our own pods, by namespace and name
        self._rooms: list[Room] | None = None  # as of the last change

    def see_node(self, body: Body) -> bool:
        """A node exists, like this. True if there may be more room than before."""
        node = node_of(body)
        if self._nodes.get(node.name) == node:
            return False  # a heartbeat
        self._nodes[node.name] = node
        self._rooms = None
        return True

    def lose_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._rooms = None

    def see_pod(self, body: Body) -> bool:
        """A pod exists, like this. True if others may have got room, or their turn, by that."""
        occupant = _occupant(body)
        if occupant is None:
            return self.lose_pod(body)
        uid = body["metadata"]["uid"]
        before = self._occupants.get(uid)
        if before == occupant:
            return False
        self._drop(uid)
        self._occupants[uid] = occupant
        if _is_ours(body):
            self._uids[occupant.namespace, occupant.name] = uid
        if occupant.node:
            self._used.setdefault(occupant.node, Counter()).update(dict(occupant.requests))
        self._rooms = None
        return before is not None and before.is_in_line and not occupant.is_in_line

    def lose_pod(self, body: Body) -> bool:
        """A pod is gone, or takes no room any more. True if there may be more room than before."""
        uid = body["metadata"]["uid"]
        place = (body["metadata"]["namespace"], body["metadata"]["name"])
        if self._uids.get(place) == uid:
            del self._uids[place]
        return self._drop(uid)

    def _drop(self, uid: str) -> bool:
        occupant = self._occupants.pop(uid, None)
        if occupant is None:
            return False
        if occupant.node:
            self._used[occupant.node].subtract(dict(occupant.requests))
        self._rooms = None
        return True

    def keep_only(self, node_names: Iterable[str] | None = None, pod_uids: Iterable[str] | None = None) -> None:
        """Forget all nodes, or all pods, but these: a list has shown what is left."""
        for name in self._nodes.keys() - set(node_names) if node_names is not None else ():
            self.lose_node(name)
        for uid in self._occupants.keys() - set(pod_uids) if pod_uids is not None else ():
            self._drop(uid)
        self._uids = {place: uid for place, uid in self._uids.items() if uid in self._occupants}

    def uid_of(self, namespace: str, name: str) -> str | None:
        """uid of one of our own pods."""
        return self._uids.get((namespace, name))

    def unbound(self) -> frozenset[PodShape]:
        """Shapes of our own pods that are about to get nodes; not of those that the scheduler found none for, or was
        kept from looking at: they may have none for ever."""
        return frozenset(o.shape for o in self._occupants.values() if o.shape is not None and o.is_in_line)

    def rooms(self, claimed: Iterable[tuple[PodShape, int]] = ()) -> list[Room]:
        """What every node has left beside what is bound to it, what our pods without a node will take, and `claimed`
        (shapes and counts of pods that are about to be made). Those are counted where they leave the most whole room;
        what finds no place takes none."""
        if self._rooms is None:
            self._rooms = [
                Room(node, {name: amount - used[name] for name, amount in node.allocatable.items()})
                for _, node in sorted(self._nodes.items())
                for used in (self._used.get(node.name, Counter()),)
            ]
        rooms = list(self._rooms)
        waiting: Counter[PodShape] = Counter(o.shape for o in self._occupants.values() if o.shape is not None)
        for shape, count in claimed:
            waiting[shape] += count
        for shape in sorted(waiting, key=_choosiest_first):
            rooms = taken(rooms, shape, fill(rooms, shape, waiting[shape]))
        return rooms


def _choosiest_first(shape: PodShape) -> tuple[int, list[int], str]:
    """Pods that may go to few nodes before those that may go to many, large ones before small ones."""
    return -len(shape.selector), [-amount for _, amount in shape.requests], repr(shape)


def _is_ours(body: Body) -> bool:
    labels = body["metadata"].get("labels") or {}
    return labels.get(names.LABEL_MANAGED_BY) == names.MANAGER and names.LABEL_GROUP in labels


def _occupant(body: Body) -> Occupant | None:
    """None: it takes no room, and will not."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    occupant = Occupant(metadata["namespace"], metadata["name"], spec.get("nodeName") or "")
    if occupant.node:
        return replace(occupant, requests=tuple(sorted(requests_of(spec).items())))
    if not _is_ours(body) or metadata.get("deletionTimestamp"):
        return None
    was_refused = any(c["type"] == "PodScheduled" and c["status"] == "False" for c in status.get("conditions") or ())
    return replace(occupant, shape=shape_of(spec), is_in_line=not was_refused)
