"""Taking a group out of service before it is deleted. Pure: observed pods, planned deletions and `now` in, steps out.

A leader pod is in its role's EndpointSlices only while its readiness gate `headrace.dev/serving` is True. The operator
sets it once all pods of the group are ready. A group that is to go loses it first; what routers have sent until they
notice, and what is under way, is finished; then the pods are deleted. Until that moment nothing is lost if the plan
changes: the gate is set again. An engine that cannot be asked is deleted right after it has left the EndpointSlices:
being told to end, it refuses new requests and finishes those that it has, by itself.

Gates stay as they are while the operator is down: what serves goes on serving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_operator.groups import Gate, GroupKey, Load, Pod
from headrace_operator.plans import Deletion

# From the gate's closing until every router has heard of it and what it had sent by then has arrived.
SETTLE_SECONDS = 2.0
POLL_SECONDS = 1.0

Groups = Mapping[GroupKey, tuple[Pod, ...]]


@dataclass(frozen=True)
class GateChange:
    """Set a leader pod's readiness gate."""

    pod_name: str
    uid: str
    is_open: bool


@dataclass(frozen=True)
class Drains:
    """The deletions that may be made now, and what comes before the others."""

    delete: tuple[Deletion, ...]
    gates: tuple[GateChange, ...] = ()
    hurry: tuple[GroupKey, ...] = ()  # their time is up: what they still have ends with an error
    messages: Mapping[GroupKey, str] = field(default_factory=dict)  # how far each group that is held back has come
    wait_seconds: float | None = None


def worth_asking(groups: Groups, replicas: Mapping[str, int]) -> list[GroupKey]:
    """Groups whose engines are to be asked what they have: those out of service, to know when they may be deleted, and
    those in service of a role that has more of them than wanted (`replicas`), to choose which one goes."""
    staying = {key: pods[0].gate for key, pods in groups.items() if not _is_going(pods)}
    num_serving = Counter(key.role for key, gate in staying.items() if gate is Gate.OPEN)
    return [
        key
        for key, gate in staying.items()
        if gate is Gate.CLOSED or (gate is Gate.OPEN and num_serving[key.role] > replicas.get(key.role, 0) > 0)
    ]


def plan_drains(
    groups: Groups, planned: Sequence[Deletion], loads: Mapping[GroupKey, Load], timeout_seconds: float, now: float
) -> Drains:
    """What becomes of the planned deletions. `loads`: what engines said; one that is missing did not answer."""
    steps = _Steps(loads, timeout_seconds, now)
    by_uid = {deletion.uid: deletion for deletion in planned}
    for key, pods in groups.items():
        deletions = [by_uid.pop(pod.uid) for pod in pods if pod.uid in by_uid]
        # A group that has lost a pod cannot serve what it has, and one that is going already drains by itself.
        if deletions and all(d.grace_seconds is None for d in deletions) and not _is_going(pods):
            steps.retire(key, pods[0], deletions)
            continue
        steps.delete += deletions
        if not deletions and not _is_going(pods):
            steps.serve(pods)
    return Drains(
        delete=(*steps.delete, *by_uid.values()),
        gates=tuple(steps.gates),
        hurry=tuple(steps.hurry),
        messages=steps.messages,
        wait_seconds=min(steps.waits, default=None),
    )


def _is_going(pods: Iterable[Pod]) -> bool:
    return any(pod.is_terminating for pod in pods)


class _Steps:
    """Collects what `plan_drains` says."""

    def __init__(self, loads: Mapping[GroupKey, Load], timeout_seconds: float, now: float) -> None:
        self._loads = loads
        self._timeout_seconds = timeout_seconds
        self._now = now
        self.delete: list[Deletion] = []
        self.gates: list[GateChange] = []
        self.hurry: list[GroupKey] = []
        self.messages: dict[GroupKey, str] = {}
        self.waits: list[float] = []

    def serve(self, pods: Sequence[Pod]) -> None:
        """A group that stays: into service once all its pods are ready."""
        leader = pods[0]
        is_shut = leader.gate in (Gate.CLOSED, Gate.UNSET)
        if leader.index == 0 and is_shut and all(pod.is_well and not pod.is_finished for pod in pods):
            self.gates.append(GateChange(leader.name, leader.uid, is_open=True))

    def retire(self, key: GroupKey, leader: Pod, deletions: list[Deletion]) -> None:
        """A whole group that goes: out of service first."""
        if leader.index != 0 or leader.gate in (Gate.NONE, Gate.UNSET) or leader.is_finished:
            self.delete += deletions  # never in service
            return
        if leader.gate is Gate.OPEN:
            self.gates.append(GateChange(leader.name, leader.uid, is_open=False))
            self._hold(key, "it is taken out of service", SETTLE_SECONDS)
            return
        closed_for = self._now - (leader.gate_since if leader.gate_since is not None else self._now)
        load = self._loads.get(key)
        if closed_for < SETTLE_SECONDS:
            self._hold(key, "routers are forgetting it", SETTLE_SECONDS - closed_for)
        elif load is None or load.is_idle:
            self.delete += deletions
        elif closed_for >= self._timeout_seconds:
            self.hurry.append(key)
            self.delete += deletions
        else:
            left = self._timeout_seconds - closed_for
            self._hold(key, str(load), min(POLL_SECONDS, left))

    def _hold(self, key: GroupKey, message: str, wait_seconds: float) -> None:
        self.messages[key] = message
        self.waits.append(wait_seconds)
