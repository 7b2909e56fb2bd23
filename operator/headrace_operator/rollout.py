"""What to create and delete next for one role. Pure: observed groups and `now` in, a plan out.

A role has `replicas` *slots*, numbered from 0; each slot holds one group of one revision.

1. Groups beyond the slots, and second groups in a slot, are deleted.
2. A group is kept whole. If one of its pods ends, is edited or vanishes, all its pods are deleted and the group is made
   again from its own revision, later and later when it fails again and again, and at last no more (`restarts.py`).
   What a slot is to hold next is noted in `rebuilds` (kept in the resource's status): an empty slot says nothing.
3. Roll-out: while no group of the wanted revision is missing or unready, one slot of an old revision is turned over:
   unready ones first, then from the highest index. Its old group goes first (drained), the new one follows: a full
   cluster has no room for both. A new revision that never gets ready thus costs one group at most.

`plan_role` looks one step ahead; applied again and again to what it caused, it ends (tests run it to the end).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from headrace_operator import names
from headrace_operator.groups import (
    OVERDUE_SECONDS,
    GroupKey,
    GroupState,
    Pod,
    Rebuild,
    RoleState,
    group_state,
)
from headrace_operator.node_loss import lost_message, only_lost
from headrace_operator.restarts import after_failure, bad_nodes, is_given_up, memory_of, wait_seconds

# Nothing is drained from a group that has lost a rank; its pods only get time to say goodbye.
BROKEN_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Creation:
    """Make these pods of a group."""

    key: GroupKey
    pods: tuple[int, ...]
    avoided_nodes: tuple[str, ...] = ()  # the group failed there again and again


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
class Slot:
    """One slot as observed, with the revision that it holds or is to hold."""

    index: int
    revision: str
    state: GroupState
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True)
class RolePlan:
    """The next step of one role."""

    slots: tuple[Slot, ...] = ()
    create: tuple[Creation, ...] = ()
    delete: tuple[Deletion, ...] = ()
    rebuilds: tuple[tuple[int, Rebuild], ...] = ()
    notes: tuple[Note, ...] = ()
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


def plan_role(state: RoleState, now: float) -> RolePlan:
    """The next step towards `state.replicas` ready groups of `state.revision`."""
    return _Planner(state, now).plan()


class _Planner:
    """One pass over one role; collects what the plan will say."""

    def __init__(self, state: RoleState, now: float) -> None:
        self.state = state
        self.now = now
        self.rebuilds = {
            # No later than now: the time was noted by an operator whose clock may have been ahead of ours.
            index: replace(noted, time=min(noted.time, now))
            for index, noted in state.rebuilds.items()
            if index < state.replicas and noted.revision in state.sizes
        }
        for index in self.rebuilds.keys() & state.retried:
            self.rebuilds[index] = replace(self.rebuilds[index], failures=0, is_final=False, nodes=())
        self.create: list[Creation] = []
        self.delete: list[Deletion] = []
        self.notes: list[Note] = []
        self.waits: list[float] = []

    def plan(self) -> RolePlan:
        slots = self._fill_slots()
        turned = self._choose_turnover(slots)
        for slot in slots:
            if slot.index == turned:
                self._turn_over(slot)
            else:
                self._keep(slot)
        return RolePlan(
            slots=tuple(slots),
            create=tuple(self.create),
            delete=tuple(self.delete),
            rebuilds=tuple(sorted(self.rebuilds.items())),
            notes=tuple(self.notes),
            wait_seconds=min(self.waits, default=None),
        )

    def _fill_slots(self) -> list[Slot]:
        """Rule 1: give every slot its group and delete the groups that have no slot."""
        by_index: dict[int, list[GroupKey]] = {}
        for key in self.state.groups:
            by_index.setdefault(key.index, []).append(key)
        slots = []
        for index in range(self.state.replicas):
            keys = sorted(by_index.pop(index, []), key=self._preference)
            slots.append(self._slot(index, keys[0] if keys else None))
            for key in keys[1:]:
                self._delete_group(self.state.groups[key])
        for key in sorted(key for keys in by_index.values() for key in keys):
            pods = self.state.groups[key]
            if not all(pod.is_terminating for pod in pods):
                self.notes.append(Note("GroupRemoved", f"{key.role} group {key.index} is not wanted any more"))
            self._delete_group(pods)
        return slots

    def _preference(self, key: GroupKey) -> tuple[bool, int, str]:
        num_ready = sum(pod.is_ready and not pod.is_terminating for pod in self.state.groups[key])
        return (key.revision != self.state.revision, -num_ready, key.revision)

    def _slot(self, index: int, key: GroupKey | None) -> Slot:
        if key is None:
            noted = self.rebuilds.get(index)
            return Slot(index, noted.revision if noted else self.state.revision, GroupState.EMPTY)
        pods = self.state.groups[key]
        return Slot(index, key.revision, group_state(pods, self.state.sizes.get(key.revision)), pods)

    def _choose_turnover(self, slots: list[Slot]) -> int | None:
        """Rule 3: the slot to turn over to the wanted revision now, if any."""
        old = []
        for slot in slots:
            noted = self.rebuilds.get(slot.index)
            is_turning = slot.state is GroupState.TERMINATING and noted and noted.revision == self.state.revision
            if slot.revision != self.state.revision and not is_turning:
                old.append(slot)
            elif slot.state is not GroupState.READY:
                return None
        return max(old, key=lambda s: (s.state is not GroupState.READY, s.index)).index if old else None

    def _turn_over(self, slot: Slot) -> None:
        self.notes.append(
            Note(
                "GroupReplaced",
                f"{self.state.role} group {slot.index} goes from revision {slot.revision} to {self.state.revision}",
            )
        )
        self.rebuilds[slot.index] = Rebuild(self.state.revision, 0, self.now, "replaced by the wanted revision")
        if slot.state is GroupState.EMPTY:
            self._create_group(slot.index, self.state.revision)
        else:
            self._delete_group(slot.pods, BROKEN_GRACE_SECONDS if slot.state is GroupState.BROKEN else None)

    def _keep(self, slot: Slot) -> None:
        """Rule 2: the next step of a slot that keeps its revision."""
        is_whole = slot.state in (GroupState.FORMING, GroupState.READY, GroupState.PARTIAL)
        if not is_whole and is_given_up(self.rebuilds.get(slot.index), self.state.restarts):
            self._rest(slot)
        elif slot.state is GroupState.EMPTY:
            self._create_group(slot.index, slot.revision)
        elif slot.state is GroupState.TERMINATING:
            # Whoever deleted a pod of it, the slot is made again as it was, unless it is noted otherwise.
            if slot.index not in self.rebuilds and slot.revision in self.state.sizes:
                message = lost_message(slot.pods) or "a pod of the group was deleted"
                self.rebuilds[slot.index] = Rebuild(slot.revision, 0, self.now, message)
            self._tell_of_lost(slot)
            self._delete_group(slot.pods, None if self._can_drain(slot) else BROKEN_GRACE_SECONDS)
        elif slot.state is GroupState.BROKEN and slot.index in self.state.retried:
            self._delete_group(slot.pods, BROKEN_GRACE_SECONDS)  # what is left of a failure that was counted
        elif slot.state is GroupState.BROKEN and only_lost(slot.pods):
            self._lose(slot)
        elif slot.state is GroupState.BROKEN:
            self._fail(slot)
        elif slot.state is GroupState.PARTIAL:
            present = {pod.index for pod in slot.pods}
            missing = tuple(i for i in range(self.state.sizes[slot.revision]) if i not in present)
            self._create_pods(GroupKey(self.state.role, slot.revision, slot.index), missing)
        else:
            self._remember(slot)
            self.waits += [pod.lost_at - self.now for pod in slot.pods if pod.lost_at is not None]

    def _can_drain(self, slot: Slot) -> bool:
        """Whether all ranks are still there: a node that is being drained leaves its pods time to finish requests."""
        is_whole = len(slot.pods) == self.state.sizes.get(slot.revision)
        return is_whole and not any(pod.is_finished or pod.is_lost for pod in slot.pods)

    def _create_group(self, index: int, revision: str) -> None:
        wait = wait_seconds(self.rebuilds.get(index), self.state.role, index, self.state.restarts, self.now)
        if wait > 0:
            self.waits.append(wait)
            return
        key = GroupKey(self.state.role, revision, index)
        self._create_pods(key, tuple(range(self.state.sizes[revision])))
        text = f"{key.role} group {index} is made from revision {revision}"
        self.notes.append(Note("GroupCreated", text, group=key))

    def _create_pods(self, key: GroupKey, pods: tuple[int, ...]) -> None:
        self.create.append(Creation(key, pods, bad_nodes(self.rebuilds.get(key.index))))

    def _lose(self, slot: Slot) -> None:
        """A node took a pod along: the group goes elsewhere, and that is no failure of its own."""
        if slot.index not in self.rebuilds and slot.revision in self.state.sizes:
            self.rebuilds[slot.index] = Rebuild(slot.revision, 0, self.now, lost_message(slot.pods))
        self._tell_of_lost(slot)
        self._delete_group(slot.pods, BROKEN_GRACE_SECONDS)

    def _tell_of_lost(self, slot: Slot) -> None:
        lost = lost_message(slot.pods)
        if lost:
            text = f"{self.state.role} group {slot.index} is made again elsewhere: {lost}"
            self.notes.append(Note(names.REASON_NODE_LOST, text, is_warning=True))

    def _fail(self, slot: Slot) -> None:
        size = self.state.sizes.get(slot.revision)
        revision = slot.revision if size is not None else self.state.revision
        rules = self.state.restarts
        noted = after_failure(self.rebuilds.get(slot.index), revision, slot.pods, size, rules, self.now)
        self.rebuilds[slot.index] = noted
        first_line = noted.message.partition("\n")[0]
        where = f"{self.state.role} group {slot.index}"
        if noted.is_final:
            text = f"{where} is given up after {rules.max_restarts} restarts: {first_line}"
            self.notes.append(Note("RestartsExhausted", text, is_warning=True))
            self._rest(slot)
        else:
            text = f"{where} is made again (failure {noted.failures} in a row): {first_line}"
            self.notes.append(Note("GroupFailed", text, is_warning=True))
            self._delete_group(slot.pods, BROKEN_GRACE_SECONDS)

    def _rest(self, slot: Slot) -> None:
        """A group that is given up: what still runs of it goes, and frees its resources. Pods that have ended hold
        none; they are kept so that their whole logs can be read."""
        self._delete_group([pod for pod in slot.pods if not pod.is_finished], BROKEN_GRACE_SECONDS)

    def _remember(self, slot: Slot) -> None:
        memory = memory_of(self.rebuilds.pop(slot.index, None), slot.state, slot.pods, self.now)
        if memory.rebuild:
            self.rebuilds[slot.index] = memory.rebuild
        if memory.wait_seconds is not None:
            self.waits.append(memory.wait_seconds)

    def _delete_group(self, pods: Iterable[Pod], grace_seconds: int | None = None) -> None:
        """Delete pods that are not being deleted yet, by force those that should long be gone."""
        for pod in pods:
            if pod.is_lost:
                self.delete.append(Deletion(pod.name, pod.uid, 0))
            elif pod.deadline is None:
                self.delete.append(Deletion(pod.name, pod.uid, grace_seconds))
            else:
                gone_at = min(pod.deadline + OVERDUE_SECONDS, pod.lost_at if pod.lost_at is not None else float("inf"))
                if self.now >= gone_at:
                    self.delete.append(Deletion(pod.name, pod.uid, 0))
                else:
                    self.waits.append(gone_at - self.now)
