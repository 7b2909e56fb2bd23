"""What the planner knows of pods and groups: plain frozen data, made from API objects or from local processes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

BACKOFF_MAX_SECONDS = 60.0
# A group that has not failed for so long starts counting its failures from zero.
FAILURE_MEMORY_SECONDS = 600.0
# Longest that a pod may overstay its own deletion before its node is taken for lost.
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
    trouble: Trouble | None = None

    @property
    def is_terminating(self) -> bool:
        return self.deadline is not None

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class GroupState(enum.StrEnum):
    """Where one group stands."""

    EMPTY = "Empty"  # no pods
    TERMINATING = "Terminating"  # at least one pod is being deleted: the others go too
    BROKEN = "Broken"  # a pod ended, was edited, or vanished after the group had started
    PARTIAL = "Partial"  # some pods were never made; none has started yet
    FORMING = "Forming"  # all pods exist, not all are ready
    READY = "Ready"


@dataclass(frozen=True)
class Rebuild:
    """What is to be made next in a slot whose group went away, and how often in a row it failed."""

    revision: str
    failures: int
    time: float  # epoch seconds when the group was given up
    message: str

    @property
    def not_before(self) -> float:
        """Epoch seconds before which the group must not be made again: waits 1, 2, 4, ... 60 s."""
        return self.time + backoff_seconds(self.failures)


@dataclass(frozen=True)
class RoleState:
    """Everything the planner reads about one role."""

    role: str
    revision: str  # wanted
    replicas: int  # wanted groups
    groups: Mapping[GroupKey, tuple[Pod, ...]]
    sizes: Mapping[str, int]  # pods per group of every revision that can be rendered
    rebuilds: Mapping[int, Rebuild] = field(default_factory=dict)  # by group index


def backoff_seconds(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return 0.0 if failures <= 0 else min(BACKOFF_MAX_SECONDS, 2.0 ** min(failures - 1, 10))


def group_state(pods: tuple[Pod, ...], size: int | None) -> GroupState:
    """State of a group of `size` pods (None: its revision is not known any more, so it cannot be completed)."""
    if not pods:
        return GroupState.EMPTY
    if any(pod.is_terminating for pod in pods):
        return GroupState.TERMINATING
    if any(pod.is_finished or pod.is_edited for pod in pods):
        return GroupState.BROKEN
    if size is not None and len(pods) < size:
        # Ranks meet once: a pod that is missing after others have started cannot join them.
        return GroupState.PARTIAL if all(pod.phase == "Pending" for pod in pods) else GroupState.BROKEN
    return GroupState.READY if all(pod.is_ready for pod in pods) else GroupState.FORMING
