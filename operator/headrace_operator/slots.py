"""Which group holds which of a role's slots. Pure.

A role has as many *slots* as groups are wanted. A slot's number is its groups' index, so an old group and the one that
takes over from it differ in revision only, and no index is ever as high as the largest number of replicas. Indices may
have gaps: when there are fewer slots than before, those go whose loss costs least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_operator import names
from headrace_operator.groups import GroupKey, GroupState, RoleState, Strategy, group_state
from headrace_operator.plans import Group, Slot


@dataclass(frozen=True)
class Layout:
    """All groups of a role, each in its place."""

    slots: tuple[Slot, ...]
    surplus: tuple[Group, ...]  # beyond the wanted number
    superseded: tuple[Group, ...]  # more than a slot can hold, such as one of a revision that was wanted in between
    leaving: tuple[Group, ...]  # told to go before, and being deleted

    @property
    def num_groups(self) -> int:
        """Groups that have pods, those included that are being deleted."""
        held = [group for slot in self.slots for group in slot.groups]
        return sum(bool(g.pods) for g in (*held, *self.surplus, *self.superseded, *self.leaving))


def lay_out(state: RoleState, strategy: Strategy, now: float) -> Layout:
    """Give every slot its group. What is known of a group is its pods, or a note that it is to be made again."""
    known = {key: _group(key, state, strategy, now) for key in {*state.groups, *state.rebuilds}}
    # While none of its pods is being deleted, the plan may still change for a group that was told to go.
    leaving = tuple(known[k] for k in sorted(state.leaving & known.keys()) if known[k].state is GroupState.TERMINATING)
    gone = {group.key for group in leaving}
    by_index: dict[int, list[Group]] = {}
    for key in sorted(known):
        if key not in gone and (known[key].pods or key.revision in state.sizes):
            by_index.setdefault(key.index, []).append(known[key])
    slots, surplus, superseded = [], [], []
    for index, groups in by_index.items():
        slot, rest = _slot(index, groups, state.revision)
        slots.append(slot)
        superseded += rest
    slots.sort(key=lambda slot: _worth(slot, state))
    for slot in slots[state.replicas :]:
        surplus += [group for group in slot.groups if group.pods]
    slots = slots[: state.replicas]
    slots += _fresh_slots(slots, state, strategy)
    return Layout(
        slots=tuple(sorted(slots, key=lambda slot: slot.index)),
        surplus=tuple(surplus),
        superseded=tuple(group for group in superseded if group.pods),
        leaving=leaving,
    )


def available_at(group: Group, strategy: Strategy) -> float | None:
    """Epoch seconds from which a ready group is available; None if that is not known or the group is not ready."""
    times = [pod.ready_since for pod in group.pods if pod.ready_since is not None]
    if group.state is not GroupState.READY or not times:
        return None
    return max(times) + strategy.min_ready_seconds


def lack_of_place(group: Group) -> str:
    """What keeps a pod of the group from a node: the scheduler, or a gate that stays shut, as Kueue's does for lack of
    quota. Empty: nothing does."""
    placeless = (names.REASON_UNSCHEDULABLE, names.REASON_SCHEDULING_GATED)
    troubles = [pod.trouble for pod in group.pods if pod.trouble is not None and pod.trouble.reason in placeless]
    return troubles[0].message if troubles else ""


def _group(key: GroupKey, state: RoleState, strategy: Strategy, now: float) -> Group:
    pods = state.groups.get(key, ())
    group = Group(key, group_state(pods, state.sizes.get(key.revision)), pods)
    since = available_at(group, strategy)
    is_available = group.state is GroupState.READY and (since is None or now >= since)
    return Group(key, group.state, pods, is_available)


def _slot(index: int, groups: list[Group], wanted: str) -> tuple[Slot, list[Group]]:
    """The slot of these groups, and those that it has no place for."""
    new = next((group for group in groups if group.revision == wanted), None)
    old = sorted((group for group in groups if group.revision != wanted), key=_reluctance)
    if new is None:
        return Slot(index, old[0]), old[1:]
    # A new group that is well needs no old one that is on its way out, or that is yet to be made again.
    if not old or (new.is_available and old[0].state in (GroupState.TERMINATING, GroupState.EMPTY)):
        return Slot(index, new), old
    return Slot(index, old[0], new), old[1:]


def _reluctance(group: Group) -> tuple[bool, bool, bool, bool, str]:
    """The smaller, the rather a group is kept."""
    state = group.state
    return (
        not group.is_available,
        state is not GroupState.READY,
        state is GroupState.EMPTY,
        state is GroupState.TERMINATING,
        group.revision,
    )


def _worth(slot: Slot, state: RoleState) -> tuple[bool, bool, bool, bool, int, int]:
    """Slots in the order in which they are kept: serving ones, then those that may soon, new before old, and of equals
    the busiest, so that the one that goes has the least to finish."""
    states = {group.state for group in slot.groups}
    is_gone = states <= {GroupState.TERMINATING, GroupState.EMPTY}
    is_new = any(group.revision == state.revision for group in slot.groups)
    loads = [state.loads[group.key] for group in slot.groups if group.key in state.loads]
    num_requests = sum(load.num_requests for load in loads)
    return (not slot.is_available, not slot.is_ready, is_gone, not is_new, -num_requests, slot.index)


def _unused(slots: list[Slot], num_wanted: int) -> Iterator[int]:
    """The lowest free indices for the slots that are missing; all are below `num_wanted`."""
    used = {slot.index for slot in slots}
    free = [index for index in range(num_wanted) if index not in used]
    yield from free[: num_wanted - len(used)]


def _fresh_slots(slots: list[Slot], state: RoleState, strategy: Strategy) -> list[Slot]:
    """The slots that are missing, of which nothing is known: they are to hold the wanted revision as far as the
    roll-out may go, and beyond that the old one that most others hold."""
    old = Counter(slot.holder.revision for slot in slots if slot.holder.revision not in ("", state.revision))
    known = [revision for revision in sorted(old) if revision in state.sizes]
    main_old = max(known, key=lambda revision: old[revision], default=None)
    num_new = sum(any(group.revision == state.revision for group in slot.groups) for slot in slots)
    fresh = []
    for index in _unused(slots, state.replicas):
        may_be_new = not strategy.is_paused and num_new < state.replicas - strategy.partition
        revision = state.revision if main_old is None or may_be_new else main_old
        num_new += revision == state.revision
        fresh.append(Slot(index, Group(GroupKey(state.role, revision, index), GroupState.EMPTY)))
    return fresh
