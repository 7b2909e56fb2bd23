"""What a plan says: plain frozen data, from the planner to whoever carries it out, reports it or prints it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from headrace_operator.groups import GroupKey, GroupState, Pod, Rebuild, Trouble


@dataclass(frozen=True)
class Creation:
    """Make these pods of a group."""

    key: GroupKey
    pods: tuple[int, ...]
    avoided_nodes: tuple[str, ...] = ()  # if there are others


@dataclass(frozen=True)
class Deletion:
    """Delete one pod. grace_seconds None: the pod's own termination grace; 0: at once, its node is lost."""

    pod_name: str
    uid: str
    grace_seconds: int | None


@dataclass(frozen=True)
class Note:
    """Something worth an event."""

    reason: str
    message: str
    is_warning: bool = False
    group: GroupKey | None = None  # whose making it tells of: nothing to tell if that is put off


@dataclass(frozen=True)
class Group:
    """One group as observed; without pods it is still to be made."""

    key: GroupKey
    state: GroupState
    pods: tuple[Pod, ...] = ()
    is_available: bool = False  # ready for as long as the strategy asks

    @property
    def revision(self) -> str:
        return self.key.revision


@dataclass(frozen=True)
class Slot:
    """One of the wanted places of a role. `successor`: the group that is to take over from an old `holder`."""

    index: int
    holder: Group
    successor: Group | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.holder, self.successor) if self.successor else (self.holder,)

    @property
    def is_ready(self) -> bool:
        return any(group.state is GroupState.READY for group in self.groups)

    @property
    def is_available(self) -> bool:
        return any(group.is_available for group in self.groups)


@dataclass(frozen=True)
class RolePlan:
    """The next step of one role."""

    slots: tuple[Slot, ...] = ()
    create: tuple[Creation, ...] = ()
    delete: tuple[Deletion, ...] = ()
    rebuilds: tuple[tuple[GroupKey, Rebuild], ...] = ()
    leaving: tuple[GroupKey, ...] = ()
    notes: tuple[Note, ...] = ()
    blocked: tuple[Trouble, ...] = ()  # what keeps further steps from being taken, the most telling first
    wait_seconds: float | None = None  # look again then, even if nothing happens

    @property
    def is_idle(self) -> bool:
        return not self.create and not self.delete

    def without(self, groups: Collection[GroupKey]) -> RolePlan:
        """The same, but these groups are not made now."""
        return replace(
            self,
            create=tuple(creation for creation in self.create if creation.key not in groups),
            notes=tuple(note for note in self.notes if note.group not in groups),
        )
