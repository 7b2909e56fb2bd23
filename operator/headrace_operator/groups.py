"""What the planner knows of pods and groups: plain frozen data, made from API objects or from local processes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace_operator.leeway import Amount

# Longest that a pod may overstay its own deletion before its node is taken for lost, whatever the API server says of
# the node: a kubelet that lives has killed the pod at its deadline.
OVERDUE_SECONDS = 30.0


@dataclass(frozen=True, order=True)
class GroupKey:
    """Identity of one group."""

    role: str
    revision: str
    index: int


@dataclass(frozen=True)
class Trouble:
    """Why a pod is not ready: a reason of names.py and a sentence."""

    reason: str
    message: str


class Gate(enum.Enum):
    """A leader's readiness gate: whether routers may send requests to its group."""

    NONE = "None"  # the pod has no gate
    UNSET = "Unset"  # never in service so far
    OPEN = "Open"
    CLOSED = "Closed"


@dataclass(frozen=True)
class Load:
    """What a group has under way, as its leader says."""

    num_requests: int
    num_pushes: int  # KV on its way out of prefill, or awaited by decode

    @property
    def is_idle(self) -> bool:
        return self.num_requests == 0 and self.num_pushes == 0

    def __str__(self) -> str:
        return f"{self.num_requests} requests and {self.num_pushes} KV pushes under way"


@dataclass(frozen=True)
class Pod:
    """One pod as observed. Times are epoch seconds."""

    name: str
    uid: str
    index: int
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    is_ready: bool = False
    deadline: float | None = None  # being deleted: when it should be gone at the latest
    is_edited: bool = False  # its containers are not what was applied
    is_restarted: bool = False  # its engine was started again in place, so it is not the one that its group knows
    ready_since: float | None = None  # since when it is ready; None: not known, or not ready
    finished_at: float | None = None  # when its engine ended, where that is known
    unschedulable_since: float | None = None  # since when the scheduler finds no node for it
    node: str = ""  # where it runs; empty before it is bound
    address: str = ""  # IP address, once it has one
    is_well: bool = False  # its containers are ready, whatever the gate says
    gate: Gate = Gate.NONE
    gate_since: float | None = None
    is_suspect: bool = False  # its node may be gone: worth asking for
    lost_at: float | None = None  # its node is silent: when the pod counts as lost
    is_lost: bool = False
    trouble: Trouble | None = None

    @property
    def is_terminating(self) -> bool:
        return self.deadline is not None

    @property
    def gone_at(self) -> float | None:
        """When a pod that is being deleted counts as gone, though nobody has said so; None: it is not being deleted."""
        if self.deadline is None:
            return None
        return min(self.deadline + OVERDUE_SECONDS, self.lost_at if self.lost_at is not None else float("inf"))

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class GroupState(enum.StrEnum):
    """Where one group stands."""

    EMPTY = "Empty"  # no pods
    TERMINATING = "Terminating"  # at least one pod is being deleted: the others go too
    BROKEN = "Broken"  # a pod ended, was edited, restarted or lost, or vanished after the group had started
    PARTIAL = "Partial"  # some pods were never made; none has started yet
    FORMING = "Forming"  # all pods exist, not all are ready
    READY = "Ready"


@dataclass(frozen=True)
class Rebuild:
    """A group that went away and is to be made again, and how often in a row it failed."""

    failures: int
    time: float  # epoch seconds when the group was given up
    message: str
    is_final: bool = False  # it has failed too often: it is not made again
    nodes: tuple[tuple[str, int], ...] = ()  # where it failed, and how often in a row there


@dataclass(frozen=True)
class RestartRules:
    """How often and how soon groups that fail are made again."""

    max_restarts: int = 5
    backoff_base_seconds: float = 1.0
    backoff_max_seconds: float = 300.0
    seed: str = ""  # differs from deployment to deployment, so that they do not all restart at the same moment


@dataclass(frozen=True)
class Strategy:
    """How old groups are replaced by groups of the wanted revision; one for all roles of a deployment."""

    max_surge: Amount = 0  # see leeway.py for these two
    max_unavailable: Amount = 1
    when_full: Literal["Wait", "Recreate"] = "Wait"
    min_ready_seconds: float = 0.0  # that a group must have been ready to be available
    partition: int = 0  # groups of a role that stay at their old revision
    is_paused: bool = False


@dataclass(frozen=True)
class RoleState:
    """Everything the planner reads about one role."""

    role: str
    revision: str  # wanted
    replicas: int  # wanted groups
    groups: Mapping[GroupKey, tuple[Pod, ...]]
    sizes: Mapping[str, int]  # pods per group of every revision that can be rendered
    rebuilds: Mapping[GroupKey, Rebuild] = field(default_factory=dict)
    leaving: frozenset[GroupKey] = frozenset()  # told to go for good; any other group that goes comes back
    restarts: RestartRules = RestartRules()
    retried: frozenset[GroupKey] = frozenset()  # groups whose failures are to be forgotten now
    loads: Mapping[GroupKey, Load] = field(default_factory=dict)  # of groups that were asked
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # KV fingerprint by revision
    costs: Mapping[str, int] = field(default_factory=dict)  # GPUs (pods, where there are none) of a group by revision


def group_state(pods: tuple[Pod, ...], size: int | None) -> GroupState:
    """State of a group of `size` pods (None: its revision is not known any more, so it cannot be completed)."""
    if not pods:
        return GroupState.EMPTY
    if any(pod.is_terminating for pod in pods):
        return GroupState.TERMINATING
    if any(pod.is_finished or pod.is_edited or pod.is_restarted or pod.is_lost for pod in pods):
        return GroupState.BROKEN
    if size is not None and len(pods) < size:
        # Ranks meet once: a pod that is missing after others have started cannot join them.
        return GroupState.PARTIAL if all(pod.phase == "Pending" for pod in pods) else GroupState.BROKEN
    return GroupState.READY if all(pod.is_ready for pod in pods) else GroupState.FORMING
