"""What happens to the groups of one role, one by one: made, kept whole, given up, told to go. Pure.

A group is kept whole. If one of its pods ends, is edited or vanishes, all its pods are deleted and the group is made
again from its own revision, later and later when it fails again and again, until it is given up (`restarts.py`). That
it is to be made again, or was told to go for good, is noted in the resource's status: a group without pods tells
nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import replace

from headrace_operator import names
from headrace_operator.groups import GroupKey, GroupState, Pod, Rebuild, RoleState, Trouble
from headrace_operator.node_loss import lost_message, only_lost
from headrace_operator.plans import Creation, Deletion, Group, Note
from headrace_operator.restarts import after_failure, bad_nodes, is_given_up, memory_of, wait_seconds

# Nothing is drained from a group that has lost a rank; its pods only get time to say goodbye.
BROKEN_GRACE_SECONDS = 5

# Asked once for every group that is about to be made, in order: None takes room for it, a text says what is missing.
Admit = Callable[[GroupKey], str | None]


class Outcome(enum.Enum):
    """What became of the wish to make a group."""

    MADE = enum.auto()
    WAITS = enum.auto()  # it failed too lately, or pods of its name are still there
    NO_ROOM = enum.auto()


class Upkeep:
    """One pass over one role; collects what the plan will say."""

    def __init__(self, state: RoleState, now: float, admit: Admit) -> None:
        self.state = state
        self.now = now
        self._admit = admit
        self.rebuilds = {
            # No later than now: the time was noted by an operator whose clock may have been ahead of ours.
            key: replace(noted, time=min(noted.time, now))
            for key, noted in state.rebuilds.items()
            if key.revision in state.sizes
        }
        for key in self.rebuilds.keys() & state.retried:
            self.rebuilds[key] = replace(self.rebuilds[key], failures=0, is_final=False, nodes=())
        self.leaving: set[GroupKey] = set()
        self.create: list[Creation] = []
        self.delete: list[Deletion] = []
        self.notes: list[Note] = []
        self.blocked: list[Trouble] = []
        self.waits: list[float] = []

    def keep(self, group: Group) -> None:
        """The next step of a group that has pods and is to stay."""
        is_whole = group.state in (GroupState.FORMING, GroupState.READY, GroupState.PARTIAL)
        if not is_whole and self.is_given_up(group.key):
            self._rest(group)
        elif group.state is GroupState.TERMINATING:
            # Whoever deleted a pod of it, the group is made again as it was.
            self._come_back(group, lost_message(group.pods) or "a pod of the group was deleted")
            self.remove(group.pods, None if self._can_drain(group) else BROKEN_GRACE_SECONDS)
        elif group.state is GroupState.BROKEN and group.key in self.state.retried:
            self.remove(group.pods, BROKEN_GRACE_SECONDS)  # what is left of a failure that was counted
        elif group.state is GroupState.BROKEN and only_lost(group.pods):
            # A node took a pod along: the group goes elsewhere, and that is no failure of its own.
            self._come_back(group, lost_message(group.pods))
            self.remove(group.pods, BROKEN_GRACE_SECONDS)
        elif group.state is GroupState.BROKEN:
            self._fail(group)
        elif group.state is GroupState.PARTIAL:
            present = {pod.index for pod in group.pods}
            missing = tuple(i for i in range(self.state.sizes[group.revision]) if i not in present)
            self._create_pods(group.key, missing)
        else:
            self._remember(group)
            self.waits += [pod.lost_at - self.now for pod in group.pods if pod.lost_at is not None]

    def retire(self, group: Group) -> None:
        """Let a group go for good, drained if it can be."""
        self.rebuilds.pop(group.key, None)
        if group.pods:
            self.leaving.add(group.key)
            is_draining = group.state is not GroupState.BROKEN and (
                group.state is not GroupState.TERMINATING or self._can_drain(group)
            )
            self.remove(group.pods, None if is_draining else BROKEN_GRACE_SECONDS)

    def make(self, key: GroupKey) -> Outcome:
        """Make a whole group now, if it may be."""
        noted = self.rebuilds.get(key)
        if self.is_given_up(key):
            return Outcome.WAITS
        wait = wait_seconds(noted, key.role, key.index, self.state.restarts, self.now)
        if wait > 0:
            self.waits.append(wait)
            return Outcome.WAITS
        if key in self.state.groups:
            return Outcome.WAITS
        shortage = self._admit(key)
        if shortage:
            self.block(names.REASON_NO_CAPACITY, f"{key.role} group {key.index}: {shortage}")
            return Outcome.NO_ROOM
        self._create_pods(key, tuple(range(self.state.sizes[key.revision])))
        text = f"{key.role} group {key.index} is made from revision {key.revision}"
        self.notes.append(Note("GroupCreated", text, group=key))
        return Outcome.MADE

    def is_given_up(self, key: GroupKey) -> bool:
        return is_given_up(self.rebuilds.get(key), self.state.restarts)

    def remove(self, pods: Iterable[Pod], grace_seconds: int | None = None) -> None:
        """Delete pods that are not being deleted yet, by force those that should long be gone."""
        for pod in pods:
            if pod.is_lost:
                self.delete.append(Deletion(pod.name, pod.uid, 0))
            elif pod.gone_at is None:
                self.delete.append(Deletion(pod.name, pod.uid, grace_seconds))
            elif self.now >= pod.gone_at:
                self.delete.append(Deletion(pod.name, pod.uid, 0))
            else:
                self.waits.append(pod.gone_at - self.now)

    def note(self, reason: str, message: str, is_warning: bool = False) -> None:
        self.notes.append(Note(reason, message, is_warning))

    def block(self, reason: str, message: str) -> None:
        self.blocked.append(Trouble(reason, message))

    def _can_drain(self, group: Group) -> bool:
        """Whether all ranks are still there: a node that is being drained leaves its pods time to finish requests."""
        is_whole = len(group.pods) == self.state.sizes.get(group.revision)
        return is_whole and not any(pod.is_finished or pod.is_lost for pod in group.pods)

    def _create_pods(self, key: GroupKey, pods: tuple[int, ...]) -> None:
        self.create.append(Creation(key, pods, bad_nodes(self.rebuilds.get(key))))

    def _come_back(self, group: Group, message: str) -> None:
        """Note that the group is made again, through no fault of its own."""
        if group.key not in self.rebuilds and group.revision in self.state.sizes:
            self.rebuilds[group.key] = Rebuild(0, self.now, message)
        lost = lost_message(group.pods)
        if lost:
            text = f"{group.key.role} group {group.key.index} is made again elsewhere: {lost}"
            self.note(names.REASON_NODE_LOST, text, is_warning=True)

    def _fail(self, group: Group) -> None:
        size = self.state.sizes.get(group.revision)
        rules = self.state.restarts
        noted = after_failure(self.rebuilds.get(group.key), group.pods, size, rules, self.now)
        first_line = noted.message.partition("\n")[0]
        where = f"{group.key.role} group {group.key.index}"
        if size is None:
            self.note("GroupFailed", f"{where} is replaced: {first_line}", is_warning=True)
            self.retire(group)  # nobody knows any more how to make it
            return
        self.rebuilds[group.key] = noted
        if noted.is_final:
            text = f"{where} is given up after {rules.max_restarts} restarts: {first_line}"
            self.note("RestartsExhausted", text, is_warning=True)
            self._rest(group)
        else:
            text = f"{where} is made again (failure {noted.failures} in a row): {first_line}"
            self.note("GroupFailed", text, is_warning=True)
            self.remove(group.pods, BROKEN_GRACE_SECONDS)

    def _rest(self, group: Group) -> None:
        """A group that is given up: what still runs of it goes, and frees its resources. Pods that have ended hold
        none; they are kept so that their whole logs can be read."""
        self.remove([pod for pod in group.pods if not pod.is_finished], BROKEN_GRACE_SECONDS)

    def _remember(self, group: Group) -> None:
        memory = memory_of(self.rebuilds.pop(group.key, None), group.state, group.pods, self.now)
        if memory.rebuild:
            self.rebuilds[group.key] = memory.rebuild
        if memory.wait_seconds is not None:
            self.waits.append(memory.wait_seconds)
