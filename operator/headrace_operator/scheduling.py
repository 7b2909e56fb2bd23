"""What the scheduler asks before it binds a pod: room, labels, taints. Pure.

The parts of it that a group of engines meets: requests of any resource, nodeSelector, required node affinity, taints.
Not looked at: affinity between pods, hard topology spread, host ports, volumes that only some nodes reach, device
claims. A pod that fails one of those waits although there is room; see `placement.py` for what happens then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator.quantities import thousandths

Body = Mapping[str, Any]
Amounts = Mapping[str, int]  # thousandths by resource name

PODS = "pods"  # the resource of which every pod takes one
HOSTNAME = "kubernetes.io/hostname"
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"  # what kubectl cordon sets
_REPELLING = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Taint:
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True)
class Node:
    """A node without its load."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]  # those that keep pods away
    allocatable: Amounts


@dataclass(frozen=True)
class Toleration:
    key: str
    operator: str
    value: str
    effect: str

    def covers(self, taint: Taint) -> bool:
        """Without a key every taint is meant, without an effect every effect."""
        if self.effect not in ("", taint.effect):
            return False
        if self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (self.key != "" and self.value == taint.value)


@dataclass(frozen=True)
class Requirement:
    """One expression of a node affinity term; `is_field`: over metadata.name, the only field there is."""

    key: str
    operator: str
    values: tuple[str, ...]
    is_field: bool

    def holds(self, node: Node) -> bool:
        value = node.name if self.is_field else node.labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compares(value)
        return False

    def _compares(self, value: str | None) -> bool:
        try:
            label, bound = int(value or ""), int(self.values[0])
        except (ValueError, IndexError):
            return False
        return label > bound if self.operator == "Gt" else label < bound


@dataclass(frozen=True)
class PodShape:
    """What the scheduler knows of a pod: equal shapes go to the same nodes."""

    requests: tuple[tuple[str, int], ...]  # thousandths by resource, none of them 0
    selector: tuple[tuple[str, str], ...] = ()
    affinity: tuple[tuple[Requirement, ...], ...] | None = None  # any of these terms; None: no such condition
    tolerations: tuple[Toleration, ...] = ()

    def times(self, count: int) -> PodShape:
        """One thing as large as `count` of these pods."""
        return PodShape(
            tuple((name, amount * count) for name, amount in self.requests),
            self.selector,
            self.affinity,
            self.tolerations,
        )

    def selecting(self, labels: Iterable[tuple[str, str]]) -> PodShape:
        """The same, on nodes with these labels only."""
        selector = tuple(sorted({**dict(self.selector), **dict(labels)}.items()))
        return PodShape(self.requests, selector, self.affinity, self.tolerations)

    def objection(self, node: Node) -> str | None:
        """Why the pod may not be on this node even if it were empty, in words that fit many nodes; None: it may."""
        if any(node.labels.get(label) != value for label, value in self.selector):
            return "other labels than its nodeSelector asks for"
        # A term without expressions matches nothing.
        if self.affinity is not None and not any(term and all(r.holds(node) for r in term) for term in self.affinity):
            return "other labels than its node affinity asks for"
        for taint in node.taints:
            if not any(toleration.covers(taint) for toleration in self.tolerations):
                return f"the taint {taint}, which it does not tolerate"
        return None


def node_of(body: Body) -> Node:
    """A node as the API server has it."""
    spec = body.get("spec") or {}
    taints = [
        Taint(taint["key"], taint.get("value") or "", taint["effect"])
        for taint in spec.get("taints") or ()
        if taint["effect"] in _REPELLING
    ]
    if spec.get("unschedulable") and not any(taint.key == _UNSCHEDULABLE for taint in taints):
        taints.append(Taint(_UNSCHEDULABLE, "", "NoSchedule"))
    return Node(
        name=body["metadata"]["name"],
        labels=dict(body["metadata"].get("labels") or {}),
        taints=tuple(taints),
        allocatable=_thousandths((body.get("status") or {}).get("allocatable")),
    )


def shape_of(spec: Body) -> PodShape:
    """The shape of a pod with this spec, be it rendered or stored. Raises ValueError if the spec is malformed."""
    try:
        node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        return PodShape(
            requests=tuple(sorted(requests_of(spec).items())),
            selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
            affinity=None if required is None else tuple(map(_term, required.get("nodeSelectorTerms") or ())),
            tolerations=tuple(map(_toleration, spec.get("tolerations") or ())),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a pod's spec: {type(error).__name__}: {error}") from error


def _term(term: Body) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(item["key"], item["operator"], tuple(item.get("values") or ()), is_field)
        for field, is_field in (("matchExpressions", False), ("matchFields", True))
        for item in term.get(field) or ()
    )


def _toleration(item: Body) -> Toleration:
    return Toleration(
        item.get("key") or "", item.get("operator") or "Equal", item.get("value") or "", item.get("effect") or ""
    )


def requests_of(spec: Body) -> dict[str, int]:
    """What a pod takes of its node, as the scheduler counts it: thousandths by resource, and one of `pods`.

    Containers and sidecars add up. An init container runs alone but for the sidecars before it, so the largest counts.
    Requests of the pod as a whole, where there are any, stand in for its containers'.
    """
    running: Counter[str] = Counter()
    sidecars: Counter[str] = Counter()
    starting: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        own = _own_requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars.update(own)
            starting = _larger(starting, sidecars)
        else:
            starting = _larger(starting, sidecars + Counter(own))
    for container in spec.get("containers") or ():
        running.update(_own_requests(container))
    total = _larger(running + sidecars, starting)
    total |= _thousandths((spec.get("resources") or {}).get("requests"))
    overhead = _thousandths(spec.get("overhead"))
    total = dict(Counter(total) + Counter(overhead))
    return {name: amount for name, amount in total.items() if amount} | {PODS: 1000}


def _own_requests(container: Body) -> dict[str, int]:
    """Requests of one container; a limit without a request is its own request."""
    resources = container.get("resources") or {}
    return _thousandths(resources.get("limits")) | _thousandths(resources.get("requests"))


def _thousandths(amounts: Body | None) -> dict[str, int]:
    return {name: thousandths(amount) for name, amount in (amounts or {}).items()}


def _larger(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: max(left.get(name, 0), right.get(name, 0)) for name in {*left, *right}}
