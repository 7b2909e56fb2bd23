"""The planner: single steps as a table, then whole histories run to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_operator.groups import (
    GroupKey,
    GroupState,
    Pod,
    Rebuild,
    RoleState,
    Trouble,
    group_state,
)
from headrace_operator.names import REASON_CRASH_LOOP
from headrace_operator.rollout import BROKEN_GRACE_SECONDS, RolePlan, plan_role

NOW = 1000.0


def pod(
    index: int = 0, phase: str = "Running", ready: bool = True, deadline: float | None = None, **more: object
) -> Pod:
    return Pod(f"pod-{index}", f"uid-{index}", index, phase, ready, deadline, **more)  # type: ignore[arg-type]


RUNNING = pod()
STARTING = pod(ready=False)
PENDING = pod(phase="Pending", ready=False)
FAILED = pod(phase="Failed", ready=False, trouble=Trouble(REASON_CRASH_LOOP, "pod-0 exited with code 1\nlast words"))
GOING = pod(deadline=NOW + 10)


def state(
    groups: dict[tuple[str, int], tuple[Pod, ...]],
    *,
    replicas: int = 1,
    size: int = 1,
    rebuilds: dict[int, Rebuild] | None = None,
    wanted: str = "new",
    known: tuple[str, ...] = ("new", "old"),
) -> RoleState:
    return RoleState(
        role="decode",
        revision=wanted,
        replicas=replicas,
        groups={GroupKey("decode", revision, index): pods for (revision, index), pods in groups.items()},
        sizes=dict.fromkeys(known, size),
        rebuilds=rebuilds or {},
    )


def created(plan: RolePlan) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(c.key.revision, c.key.index, c.pods) for c in plan.create]


def deleted(plan: RolePlan) -> list[tuple[str, int | None]]:
    return [(d.uid, d.grace_seconds) for d in plan.delete]


@pytest.mark.parametrize(
    ("pods", "size", "expected"),
    [
        ((), 1, GroupState.EMPTY),
        ((PENDING,), 1, GroupState.FORMING),
        ((STARTING,), 1, GroupState.FORMING),
        ((RUNNING,), 1, GroupState.READY),
        ((RUNNING, replace(STARTING, index=1)), 2, GroupState.FORMING),
        ((PENDING,), 2, GroupState.PARTIAL),
        ((STARTING,), 2, GroupState.BROKEN),  # its sibling vanished after it had started
        ((RUNNING, FAILED), 2, GroupState.BROKEN),
        ((RUNNING, pod(1, phase="Succeeded")), 2, GroupState.BROKEN),
        ((pod(is_edited=True),), 1, GroupState.BROKEN),
        ((RUNNING, GOING), 2, GroupState.TERMINATING),
        ((FAILED, GOING), 2, GroupState.TERMINATING),  # on its way already: not counted twice
        ((RUNNING,), None, GroupState.READY),
    ],
)
def test_state_of_a_group(pods: tuple[Pod, ...], size: int | None, expected: GroupState) -> None:
    assert group_state(pods, size) is expected


def test_empty_slots_are_filled_at_once_with_whole_groups() -> None:
    plan = plan_role(state({}, replicas=2, size=2), NOW)
    assert created(plan) == [("new", 0, (0, 1)), ("new", 1, (0, 1))]


def test_nothing_is_done_when_all_is_as_wanted() -> None:
    plan = plan_role(state({("new", 0): (RUNNING,), ("new", 1): (RUNNING,)}, replicas=2), NOW)
    assert plan.is_idle
    assert plan.wait_seconds is None
    assert plan.notes == ()


def test_a_group_that_lost_a_pod_is_deleted_whole_with_little_grace() -> None:
    other = pod(1)
    plan = plan_role(state({("new", 0): (FAILED, other)}, size=2), NOW)
    assert deleted(plan) == [("uid-0", BROKEN_GRACE_SECONDS), ("uid-1", BROKEN_GRACE_SECONDS)]
    assert dict(plan.rebuilds)[0] == Rebuild("new", 1, NOW, "pod-0 exited with code 1\nlast words")


def test_a_failed_group_is_made_again_after_its_backoff() -> None:
    waiting = {0: Rebuild("new", 3, NOW, "")}
    early = plan_role(state({}, rebuilds=waiting), NOW + 3)
    assert early.is_idle
    assert early.wait_seconds is not None
    assert 0 < early.wait_seconds <= 1
    assert created(plan_role(state({}, rebuilds=waiting), NOW + 4)) == [("new", 0, (0,))]


def test_when_someone_deletes_one_pod_its_siblings_follow_and_the_group_returns() -> None:
    plan = plan_role(state({("old", 0): (GOING, pod(1))}, size=2, wanted="old"), NOW)
    assert deleted(plan) == [("uid-1", None)]  # all ranks are there, so the whole group drains
    assert dict(plan.rebuilds)[0].revision == "old"
    assert dict(plan.rebuilds)[0].failures == 0


@pytest.mark.parametrize("others", [(replace(FAILED, index=1, uid="uid-1"), pod(2)), (pod(2),)])
def test_nothing_is_drained_from_a_group_that_has_lost_a_rank_too(others: tuple[Pod, ...]) -> None:
    plan = plan_role(state({("new", 0): (GOING, *others)}, size=3), NOW)
    assert {grace for _, grace in deleted(plan)} == {BROKEN_GRACE_SECONDS}


def test_a_policy_that_edits_every_pod_is_met_with_backoff() -> None:
    plan = plan_role(state({("new", 0): (pod(is_edited=True),)}), NOW)
    assert deleted(plan) == [("uid-0", BROKEN_GRACE_SECONDS)]
    assert dict(plan.rebuilds)[0] == Rebuild("new", 1, NOW, "pod pod-0 was edited")
    again = plan_role(state({("new", 0): (pod(is_edited=True),)}, rebuilds=dict(plan.rebuilds)), NOW + 10)
    assert dict(again.rebuilds)[0].failures == 2


def test_a_failure_noted_by_a_clock_that_was_ahead_delays_no_longer_than_any_other() -> None:
    ahead = {0: Rebuild("new", 3, NOW + 7200, "")}
    plan = plan_role(state({}, rebuilds=ahead), NOW)
    assert plan.wait_seconds is not None
    assert plan.wait_seconds <= 4
    assert created(plan_role(state({}, rebuilds=dict(plan.rebuilds)), NOW + 4)) == [("new", 0, (0,))]


def test_pods_that_were_never_made_are_added_while_none_has_started() -> None:
    assert created(plan_role(state({("new", 0): (PENDING,)}, size=3), NOW)) == [("new", 0, (1, 2))]


def test_a_pod_that_overstays_its_deletion_is_removed_by_force() -> None:
    stuck = pod(deadline=NOW - 31)
    assert deleted(plan_role(state({("new", 0): (stuck,)}), NOW)) == [("uid-0", 0)]
    late = plan_role(state({("new", 0): (pod(deadline=NOW - 1),)}), NOW)
    assert late.is_idle
    assert late.wait_seconds == pytest.approx(29)


def test_scaling_down_drains_the_last_groups() -> None:
    groups = {("new", i): (pod(i),) for i in range(3)}
    plan = plan_role(state(groups, replicas=1), NOW)
    assert deleted(plan) == [("uid-1", None), ("uid-2", None)]


def test_a_removed_role_loses_all_groups() -> None:
    plan = plan_role(state({("old", 0): (RUNNING,)}, replicas=0, wanted=""), NOW)
    assert deleted(plan) == [("uid-0", None)]


def test_one_old_group_at_a_time_is_drained_for_the_new_revision() -> None:
    groups = {("old", i): (pod(i),) for i in range(3)}
    plan = plan_role(state(groups, replicas=3), NOW)
    assert deleted(plan) == [("uid-2", None)]
    assert plan.create == ()


def test_the_next_old_group_waits_until_the_new_one_is_ready() -> None:
    groups = {("old", 0): (pod(0),), ("new", 1): (replace(STARTING, index=1),)}
    assert plan_role(state(groups, replicas=2), NOW).is_idle
    groups["new", 1] = (pod(1),)
    assert deleted(plan_role(state(groups, replicas=2), NOW)) == [("uid-0", None)]


def test_unready_old_groups_are_turned_over_first() -> None:
    groups = {("old", 0): (STARTING,), ("old", 1): (pod(1),)}
    assert deleted(plan_role(state(groups, replicas=2), NOW)) == [("uid-0", None)]


def test_an_old_group_that_fails_during_a_stuck_rollout_returns_in_its_own_revision() -> None:
    groups = {("old", 0): (FAILED,), ("new", 1): (replace(STARTING, index=1, uid="uid-1"),)}
    plan = plan_role(state(groups, replicas=2), NOW)
    assert dict(plan.rebuilds)[0].revision == "old"
    empty = plan_role(state({("new", 1): groups["new", 1]}, replicas=2, rebuilds=dict(plan.rebuilds)), NOW + 5)
    assert created(empty) == [("old", 0, (0,))]


def test_a_group_whose_revision_is_lost_is_replaced_by_the_wanted_one_once_it_fails() -> None:
    groups = {("old", 0): (FAILED,), ("new", 1): (replace(STARTING, index=1),)}
    plan = plan_role(state(groups, replicas=2, known=("new",)), NOW)
    assert dict(plan.rebuilds)[0].revision == "new"


def test_of_two_groups_in_a_slot_the_wanted_revision_stays() -> None:
    plan = plan_role(state({("old", 0): (RUNNING,), ("new", 0): (replace(STARTING, uid="uid-9"),)}), NOW)
    assert deleted(plan) == [("uid-0", None)]


class World:
    """A cluster that does what plans say: pods become ready after a while, deletions take a while."""

    def __init__(self, size: int, bad_revisions: frozenset[str] = frozenset()) -> None:
        self.size = size
        self.bad = bad_revisions
        self.groups: dict[GroupKey, list[Pod]] = {}
        self.rebuilds: dict[int, Rebuild] = {}
        self.now = 0.0
        self.num_made = 0
        self.lowest_ready = 10**6

    def num_ready(self) -> int:
        return sum(group_state(tuple(pods), self.size) is GroupState.READY for pods in self.groups.values())

    def step(self, wanted: str, replicas: int) -> RolePlan:
        known = {key.revision for key in self.groups} | {r.revision for r in self.rebuilds.values()} | {wanted}
        role = RoleState(
            role="decode",
            revision=wanted,
            replicas=replicas,
            groups={key: tuple(pods) for key, pods in self.groups.items()},
            sizes=dict.fromkeys(known, self.size),
            rebuilds=self.rebuilds,
        )
        plan = plan_role(role, self.now)
        self.rebuilds = dict(plan.rebuilds)
        gone = {deletion.uid for deletion in plan.delete}
        for key, pods in list(self.groups.items()):
            kept = [p for p in pods if not p.is_terminating]
            self.groups[key] = [replace(p, deadline=self.now, is_ready=False) if p.uid in gone else p for p in kept]
            self.groups[key] = [self._aged(key, p) for p in self.groups[key]]
            if not self.groups[key]:
                del self.groups[key]
        for creation in plan.create:
            assert all(not p.is_terminating for p in self.groups.get(creation.key, []))
            for index in creation.pods:
                self.num_made += 1
                made = Pod(f"p{index}", f"u{self.num_made}", index, "Pending")
                self.groups.setdefault(creation.key, []).append(made)
        self.now += 1.0
        self.lowest_ready = min(self.lowest_ready, self.num_ready())
        return plan

    def _aged(self, key: GroupKey, old: Pod) -> Pod:
        if old.phase == "Pending":
            return replace(old, phase="Running")
        if old.phase == "Running" and not old.is_terminating:
            return replace(old, phase="Failed") if key.revision in self.bad else replace(old, is_ready=True)
        return old

    def settle(self, wanted: str, replicas: int, max_steps: int = 400) -> None:
        for _ in range(max_steps):
            plan = self.step(wanted, replicas)
            revisions = {key.revision for key in self.groups}
            if plan.is_idle and self.num_ready() == replicas and revisions <= {wanted}:
                return
        raise AssertionError(f"not settled: {self.groups}")


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3),
    history=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_any_history_of_changes_settles(size: int, history: list[tuple[str, int, int]]) -> None:
    world = World(size)
    for revision, replicas, num_steps in history:
        for _ in range(num_steps):
            world.step(revision, replicas)
    world.settle(*history[-1][:2])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3), replicas=st.integers(1, 4), victims=st.lists(st.integers(0, 100), max_size=6))
def test_any_lost_pods_come_back_as_whole_groups(size: int, replicas: int, victims: list[int]) -> None:
    world = World(size)
    world.settle("a", replicas)
    for victim in victims:
        pods = [(key, p) for key, members in world.groups.items() for p in members]
        if pods:
            key, lost = pods[victim % len(pods)]
            world.groups[key].remove(lost)
            if not world.groups[key]:
                del world.groups[key]
        world.step("a", replicas)
    world.settle("a", replicas)
    assert all(len(pods) == size for pods in world.groups.values())


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_rollout_never_takes_more_than_one_group_out(replicas: int) -> None:
    world = World(size=2)
    world.settle("a", replicas)
    world.lowest_ready = replicas
    world.settle("b", replicas)
    assert world.lowest_ready == replicas - 1
    assert world.num_made == 2 * 2 * replicas  # every group was made exactly twice


def test_a_bad_revision_costs_one_group_and_a_revert_brings_it_back() -> None:
    world = World(size=1, bad_revisions=frozenset("b"))
    world.settle("a", 3)
    for _ in range(300):
        world.step("b", 3)
    assert world.lowest_ready == 2 or world.num_ready() == 2
    before = world.num_made
    for _ in range(60):
        world.step("b", 3)
    assert world.num_made - before <= 2  # at most one try a minute by now
    world.settle("a", 3)


def test_three_revisions_in_a_row_keep_groups_that_serve() -> None:
    world = World(size=1)
    world.settle("a", 4)
    world.lowest_ready = 4
    for wanted in "bcb":
        for _ in range(3):
            world.step(wanted, 4)
    world.settle("c", 4)
    assert world.lowest_ready >= 3
