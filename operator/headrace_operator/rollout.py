"""What to create and delete next for all roles of a deployment. Pure: observed groups and `now` in, a plan out.

1. Groups that no slot has a place for (`slots.py`) go, whole. Roles shrink before they grow: while such groups are
   there, a group is added only if all roles together then cost no more than the spec asks for.
2. A group is kept whole and made again from its own revision (`upkeep.py`).
3. Roll-out: slots whose group is of an old revision are turned over, unready ones first, then from the highest index.
   A ready group is replaced with surge (the new group is made beside it, and it goes once the new one is available) or
   in place (it goes first), as the strategy allows: never more than `max_surge` groups too many, never fewer than
   replicas - `max_unavailable` available slots because of a roll-out. No more slots are in transition than the sum of
   the two, so that a new revision that never gets ready costs no more than these.
4. Where there is no room for surge, a group is replaced in place if one may be unavailable; if not, `when_full` says
   whether to wait for room or to do it all the same.
5. A group that was made with surge gives its room back to a slot without a group that finds none.
6. Across a change of the KV fingerprint, `pairing.py` has a say in which available old group may go.

`plan_deployment` looks one step ahead; applied again and again to what it caused, it ends (tests run it to the end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace_operator import names
from headrace_operator.budget import Budget, cost_of
from headrace_operator.groups import GroupKey, GroupState, RoleState, Strategy
from headrace_operator.leeway import leeway
from headrace_operator.pairing import Pairing, Side
from headrace_operator.plans import Group, RolePlan, Slot
from headrace_operator.slots import available_at, lack_of_place, lay_out
from headrace_operator.upkeep import Admit, Outcome, Upkeep


def plan_deployment(
    roles: Sequence[RoleState], strategy: Strategy, now: float, admit: Admit = lambda key: None
) -> dict[str, RolePlan]:
    """The next step of every role towards its wanted groups. Total: whatever is observed, there is a plan."""
    passes = [_RolePass(state, strategy, now, admit) for state in roles]
    for each in passes:
        each.retire_extras()
    pairing = Pairing([each.side() for each in passes if each.state.revision])
    for each in passes:
        each.finish_handovers(pairing)
        each.turn_over_unready(pairing)
    room = Budget.of([each.state for each in passes], any(each.is_shrinking for each in passes))
    for each in passes:
        each.keep_and_fill(room)
    room.is_owed = any(each.has_unfilled_slots() for each in passes)
    if any(each.is_short for each in passes) and not any(each.is_freeing_room() for each in passes):
        surges = [(each, surge, kept) for each in passes for surge, kept in each.surges()]
        if surges:
            each, surge, kept = min(surges, key=lambda found: found[1].is_available)
            each.give_back(surge, kept)
    for each in passes:
        each.turn_over_ready(pairing, room)
    return {each.state.role: each.result() for each in passes}


class _RolePass:
    """One pass over one role. The public methods are called in the order in which they stand here."""

    def __init__(self, state: RoleState, strategy: Strategy, now: float, admit: Admit) -> None:
        self.state = state
        self._strategy = strategy
        self._leeway = leeway(strategy.max_surge, strategy.max_unavailable, state.replicas)
        self._now = now
        self._upkeep = Upkeep(state, now, admit)
        self._layout = lay_out(state, strategy, now)
        self._slots = {slot.index: slot for slot in self._layout.slots}
        self._counted: tuple[int, int] | None = None
        self._num_groups = self._layout.num_groups
        self._max_groups = state.replicas + self._leeway.max_surge  # those on their way out included
        self.is_short = False  # a slot finds no room for its group
        self.is_shrinking = (
            self._num_groups > self._max_groups
            or bool(self._layout.surplus)
            or any(group.key.index not in self._slots for group in self._layout.leaving)
        )

    def retire_extras(self) -> None:
        """Rule 1: what has no slot goes, and what was told to go keeps going."""
        for group in (*self._layout.surplus, *self._layout.superseded):
            text = f"{self.state.role} group {group.key.index} of revision {group.revision} is not wanted any more"
            self._retire(group, "GroupRemoved", text)
        for group in self._layout.leaving:
            self._upkeep.retire(group)

    def side(self) -> Side:
        slots = self._slots.values()
        return Side(
            role=self.state.role,
            replicas=self.state.replicas,
            num_new=sum(any(g.is_available and not self._is_unpaired(g) for g in slot.groups) for slot in slots),
            num_old=sum(slot.holder.is_available and self._is_unpaired(slot.holder) for slot in slots),
        )

    def finish_handovers(self, pairing: Pairing) -> None:
        """Rule 3: an old group goes once its successor is available."""
        for slot in self._in_order():
            if slot.successor and slot.successor.is_available and not self._strategy.is_paused:
                self._replace(slot, slot.successor, pairing)

    def turn_over_unready(self, pairing: Pairing) -> None:
        """Rule 3: an old group that is not ready serves nobody: it goes first, and its going costs nothing."""
        for slot in self._in_order():
            if slot.holder.state is not GroupState.READY and self._is_due(slot) and self._num_transitions_left() > 0:
                self._replace(slot, self._wanted_group(slot.index), pairing)

    def keep_and_fill(self, room: Budget) -> None:
        """Rule 2: groups that stay are kept whole, and empty slots get their group."""
        for slot in self._slots.values():
            for group in slot.groups:
                if group.pods:
                    self._upkeep.keep(group)
                elif group is slot.holder:
                    outcome = self._fill(group, room)
                    # Beside a successor that was begun it is not missed: that one takes over.
                    self.is_short |= outcome is Outcome.NO_ROOM and not (slot.successor and slot.successor.pods)

    def has_unfilled_slots(self) -> bool:
        """Whether a slot waits for its group: what becomes free is owed to it."""
        made = {creation.key for creation in self._upkeep.create}
        holders = [slot.holder for slot in self._slots.values()]
        return any(not g.pods and g.key not in made and not self._upkeep.is_given_up(g.key) for g in holders)

    def is_freeing_room(self) -> bool:
        """Whether groups are on their way out already."""
        return bool(self._upkeep.delete or self._layout.leaving) or any(
            group.state is GroupState.TERMINATING for slot in self._slots.values() for group in slot.groups
        )

    def surges(self) -> list[tuple[Group, Group]]:
        """Of every slot that holds two groups: the one that it can do without, and the other."""
        return [
            (slot.successor, slot.holder)
            if slot.holder.is_available or self._strategy.is_paused
            else (slot.holder, slot.successor)
            for slot in self._in_order()
            if slot.holder.pods and slot.successor and slot.successor.pods
        ]

    def give_back(self, surge: Group, kept: Group) -> None:
        """Rule 5: of two groups of a slot one goes, for the group of another slot."""
        where = f"{self.state.role} group {surge.key.index}"
        text = f"{where} of revision {surge.revision} gives its room back: a slot without a group finds none"
        self._retire(surge, "SurgeGivenBack", text)
        self._set(Slot(kept.key.index, kept))

    def turn_over_ready(self, pairing: Pairing, room: Budget) -> None:
        """Rules 3 to 5: ready old groups, as far as the strategy allows."""
        for slot in self._in_order():
            if self._strategy.is_paused:
                return
            if slot.successor and not slot.successor.is_available:
                if self._lacks_room(slot.successor, room):
                    self._make_way(slot, slot.successor, pairing, is_full=True)
            elif slot.holder.state is GroupState.READY and self._is_due(slot) and self._num_transitions_left() > 0:
                outcome = self._surge(slot, room)
                if outcome is not Outcome.MADE:
                    self._make_way(slot, self._wanted_group(slot.index), pairing, outcome is Outcome.NO_ROOM)

    def result(self) -> RolePlan:
        slots = [self._slots[index] for index in sorted(self._slots)]
        upkeep = self._upkeep
        due = [available_at(group, self._strategy) for slot in slots for group in slot.groups]
        waits = [*upkeep.waits, *(time - self._now for time in due if time is not None and time > self._now)]
        if self._strategy.is_paused and any(self._is_old(slot.holder) for slot in slots):
            upkeep.block(names.REASON_PAUSED, f"the roll-out of {self.state.role} is paused (spec.paused)")
        kept = {group.key for slot in slots for group in slot.groups}
        return RolePlan(
            slots=tuple(slots),
            create=tuple(upkeep.create),
            delete=tuple(upkeep.delete),
            rebuilds=tuple(sorted((key, noted) for key, noted in upkeep.rebuilds.items() if key in kept)),
            leaving=tuple(sorted(upkeep.leaving)),
            notes=tuple(upkeep.notes),
            blocked=tuple(upkeep.blocked),
            wait_seconds=min(waits, default=None),
        )

    def _in_order(self) -> list[Slot]:
        """A snapshot of the slots, in the order in which they are turned over."""
        return sorted(self._slots.values(), key=lambda slot: -slot.index)

    def _wanted_group(self, index: int) -> Group:
        return Group(GroupKey(self.state.role, self.state.revision, index), GroupState.EMPTY)

    def _is_old(self, group: Group) -> bool:
        return group.revision != self.state.revision

    def _is_unpaired(self, group: Group) -> bool:
        """Whether its cache has other bytes than that of the wanted revision."""
        fingerprints = self.state.fingerprints
        return fingerprints.get(group.revision) != fingerprints.get(self.state.revision)

    def _is_due(self, slot: Slot) -> bool:
        """Whether the slot is to be turned over and nothing has been done for it yet."""
        if slot.successor or not self._is_old(slot.holder) or self._strategy.is_paused:
            return False
        num_turned, _ = self._counts()
        return num_turned < self.state.replicas - self._strategy.partition

    def _num_transitions_left(self) -> int:
        _, num_under_way = self._counts()
        return self._leeway.max_surge + self._leeway.max_unavailable - num_under_way

    def _counts(self) -> tuple[int, int]:
        """(slots with a group of the wanted revision, slots that wait for one to become available)."""
        if self._counted is None:
            slots = self._slots.values()
            self._counted = (
                sum(not all(self._is_old(group) for group in slot.groups) for slot in slots),
                sum(
                    slot.successor is not None or (not self._is_old(slot.holder) and not slot.holder.is_available)
                    for slot in slots
                ),
            )
        return self._counted

    def _set(self, slot: Slot) -> None:
        self._slots[slot.index] = slot
        self._counted = None

    def _replace(self, slot: Slot, successor: Group, pairing: Pairing) -> None:
        """Let the holder of a slot go, for `successor`, unless another role still needs it."""
        holder = slot.holder
        if holder.is_available and self._is_unpaired(holder):
            obstacle = pairing.obstacle(self.state.role)
            if obstacle:
                text = f"{self.state.role} group {slot.index} of revision {holder.revision} stays: {obstacle}"
                self._upkeep.block(names.REASON_WAITING_FOR_PAIR, text)
                return
            pairing.retired(self.state.role)
        text = f"{self.state.role} group {slot.index} goes from revision {holder.revision} to {self.state.revision}"
        self._retire(holder, "GroupReplaced", text)
        self._set(Slot(slot.index, successor))

    def _retire(self, group: Group, reason: str, message: str) -> None:
        if group.key not in self.state.leaving:
            self._upkeep.note(reason, message)
        self._upkeep.retire(group)

    def _fill(self, group: Group, room: Budget) -> Outcome:
        """Make the group of an empty slot."""
        cost = cost_of(self.state, group.revision)
        if self._num_groups >= self._max_groups:
            return Outcome.WAITS  # others go first
        if not room.has(cost):
            text = (
                f"{self.state.role} group {group.key.index} waits until surplus groups are gone: {room.shortage(cost)}"
            )
            self._upkeep.block(names.REASON_SHRINKING_FIRST, text)
            return Outcome.WAITS
        outcome = self._upkeep.make(group.key)
        if outcome is Outcome.MADE:
            self._num_groups += 1
            room.used += cost
        return outcome

    def _surge(self, slot: Slot, room: Budget) -> Outcome:
        """Make the successor of a slot beside its holder, if one more group is allowed."""
        num_handovers = sum(other.successor is not None for other in self._slots.values())
        is_allowed = num_handovers < self._leeway.max_surge and self._num_groups < self._max_groups
        if not is_allowed or room.is_shrinking or room.is_owed:
            return Outcome.WAITS
        successor = self._wanted_group(slot.index)
        outcome = self._upkeep.make(successor.key)
        if outcome is Outcome.MADE:
            self._num_groups += 1
            self._set(replace(slot, successor=successor))
        return outcome

    def _lacks_room(self, successor: Group, room: Budget) -> bool:
        """Whether a successor that was begun cannot go on; one that failed is made again here."""
        if successor.pods:
            return bool(lack_of_place(successor))
        if self._num_groups >= self._max_groups or room.is_owed:
            return False
        outcome = self._upkeep.make(successor.key)
        self._num_groups += outcome is Outcome.MADE
        return outcome is Outcome.NO_ROOM

    def _make_way(self, slot: Slot, successor: Group, pairing: Pairing, is_full: bool) -> None:
        """Let a ready old group go before its successor is there, if a slot may be unavailable."""
        strategy = self._strategy
        allowed = self._leeway.max_unavailable
        if is_full and strategy.when_full == "Recreate":
            allowed = max(1, allowed)
        num_available = sum(other.is_available for other in self._slots.values())
        if num_available - slot.is_available >= self.state.replicas - allowed:
            self._replace(slot, successor, pairing)
        elif is_full and strategy.when_full == "Wait":
            text = (
                f"there is no room for {self.state.role} group {slot.index} of revision {successor.revision} beside "
                f"the old one, which maxUnavailable {strategy.max_unavailable} keeps: add room, or set "
                "whenFull: Recreate"
            )
            lack = lack_of_place(successor)
            self._upkeep.block(names.REASON_NO_CAPACITY, f"{text} ({lack})" if lack else text)
