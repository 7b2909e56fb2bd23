"""Why groups wait for room, in one sentence with numbers. Pure.

"decode needs 32 GPUs in one domain (8 pods of 4); the freest, rack-b, has 28"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace_operator.api_pods import GPU_RESOURCE
from headrace_operator.capacity import GroupShape, Room, domains, num_pods
from headrace_operator.placement import Allotment, Scope, Wish
from headrace_operator.scheduling import HOSTNAME, PODS, PodShape

_BINARY_UNITS = ("Ti", "Gi", "Mi", "Ki")
# Of two resources that are equally short the first is told of; those that are not named come before all of these.
_LEAST_TELLING = ("cpu", "memory", PODS)
_MAX_OBJECTIONS = 3


def shortage(allotment: Allotment, home: str | None, rooms: Sequence[Room]) -> str:
    """Why `allotment.waiting` (not empty) wait. `rooms`: as they were before anything was allotted."""
    scope = allotment.scope
    if scope.home_label is not None and home is None:
        return _whole_deployment(allotment.waiting, scope.home_label, rooms)
    classes: dict[tuple[str, GroupShape], list[Wish]] = {}
    for wish in allotment.waiting:
        classes.setdefault((wish.key.role, wish.shape), []).append(wish)
    return "; ".join(
        _one_class(role, shape, len(wishes), scope, home, allotment.rooms) for (role, shape), wishes in classes.items()
    )


def _one_class(role: str, shape: GroupShape, count: int, scope: Scope, home: str | None, rooms: Sequence[Room]) -> str:
    who = f"{role} needs" if count == 1 else f"{count} groups of {role} wait, each needs"
    within, place, label = list(rooms), "", scope.group_label
    if scope.home_label is not None and home is not None:
        within = domains(rooms, scope.home_label).get(home, [])
        place = f" in {home}, where the deployment is"
        label = None if label == scope.home_label else label
    usable = [room for room in within if shape.pod.objection(room.node) is None]
    if label is not None:
        usable = [room for room in usable if label in room.node.labels]
    if not usable:
        return f"{who} {_need(shape, _telling(shape.pod))}{place}; {_objections(within, shape.pod, label)}"
    if label is None:
        resource = _scarcest(usable, shape.pod)
        has = "it has" if place else "the nodes that it may use have"
        return f"{who} {_need(shape, resource)}{place}; {has} {_has(usable, shape, resource)}"
    parts = domains(usable, label)
    freest = max(parts, key=lambda value: (_fit(parts[value], shape.pod), _sum(parts[value], shape.pod), value))
    resource = _scarcest(parts[freest], shape.pod)
    where = "on one node" if label == HOSTNAME else "in one domain"
    return (
        f"{who} {_need(shape, resource)} {where}{place}; the freest, {freest}, has "
        f"{_has(parts[freest], shape, resource)}"
    )


def _whole_deployment(wishes: Sequence[Wish], label: str, rooms: Sequence[Room]) -> str:
    """For the choice of a deployment's domain: nothing is made until all of it fits into one."""
    shapes = [wish.shape for wish in wishes]
    resource = _telling(max(shapes, key=lambda s: s.num_pods * _amount(s.pod, _telling(s.pod))).pod)
    need = sum(shape.num_pods * _amount(shape.pod, resource) for shape in shapes)
    usable = [room for room in rooms if any(s.pod.objection(room.node) is None for s in shapes)]
    parts = domains(usable, label)
    who = f"the deployment needs {_words(resource, need)} in one domain"
    if not parts:
        return f"{who}; {_objections(rooms, shapes[0].pod, label)}"
    freest = max(parts, key=lambda value: (sum(max(0, r.free.get(resource, 0)) for r in parts[value]), value))
    free = sum(max(0, room.free.get(resource, 0)) for room in parts[freest])
    return f"{who}; the freest, {freest}, has {_number(resource, free)}" + (
        ", but not in the right pieces" if free >= need else ""
    )


def _need(shape: GroupShape, resource: str) -> str:
    each = _amount(shape.pod, resource)
    total = _words(resource, each * shape.num_pods)
    return (
        total
        if shape.num_pods == 1 or resource == PODS
        else f"{total} ({shape.num_pods} pods of {_number(resource, each)})"
    )


def _has(rooms: Sequence[Room], shape: GroupShape, resource: str) -> str:
    free = sum(max(0, room.free.get(resource, 0)) for room in rooms)
    if free < shape.num_pods * _amount(shape.pod, resource):
        return _number(resource, free)
    return f"{_number(resource, free)}, but in pieces: room for {_fit(rooms, shape.pod)} of {shape.num_pods} pods"


def _fit(rooms: Sequence[Room], shape: PodShape) -> int:
    return sum(num_pods(room, shape) for room in rooms)


def _sum(rooms: Sequence[Room], shape: PodShape) -> int:
    return sum(max(0, room.free.get(_telling(shape), 0)) for room in rooms)


def _scarcest(rooms: Sequence[Room], shape: PodShape) -> str:
    """The resource that keeps most pods away."""
    return min(
        (name for name, _ in shape.requests),
        key=lambda name: (
            sum(max(0, room.free.get(name, 0)) // _amount(shape, name) for room in rooms),
            _rank(name),
        ),
    )


def _telling(shape: PodShape) -> str:
    """The resource that people count such pods by."""
    return min((name for name, _ in shape.requests), key=_rank)


def _rank(resource: str) -> tuple[int, str]:
    return (_LEAST_TELLING.index(resource) + 1 if resource in _LEAST_TELLING else 0, resource)


def _amount(shape: PodShape, resource: str) -> int:
    return dict(shape.requests).get(resource, 0)


def _words(resource: str, amount: int) -> str:
    """An amount (thousandths) with what it is an amount of."""
    names = {GPU_RESOURCE: "GPUs", "cpu": "CPUs", PODS: "pods"}
    return f"{_number(resource, amount)} {names.get(resource, resource)}"


def _number(resource: str, amount: int) -> str:
    whole = amount // 1000
    if resource == "memory" or resource.startswith("hugepages-") or resource.endswith("storage"):
        for power, unit in zip((4, 3, 2, 1), _BINARY_UNITS, strict=True):
            if whole >= 1024**power:
                return f"{whole / 1024**power:.4g}{unit}"
    return str(whole) if amount % 1000 == 0 else f"{amount / 1000:.3f}".rstrip("0")


def _objections(rooms: Sequence[Room], shape: PodShape, label: str | None) -> str:
    """Why none of these nodes will do."""
    if not rooms:
        return "there are no such nodes"
    counts: Counter[str] = Counter()
    for room in rooms:
        objection = shape.objection(room.node)
        if objection is None and label is not None and label not in room.node.labels:
            objection = f"no label {label}"
        counts[objection or "no room"] += 1
    told = [f"{count} have {text}" for text, count in counts.most_common(_MAX_OBJECTIONS)]
    return f"no node will do: of {len(rooms)}, {', '.join(told)}"
