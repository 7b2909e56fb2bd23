"""The planner, single steps: what is done next for one role."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.role_worlds import (
    FAILED,
    GOING,
    NOW,
    PENDING,
    RUNNING,
    STARTING,
    Wanted,
    World,
    created,
    deleted,
    key,
    plan_role,
    pod,
    state,
)

from headrace_operator.groups import GroupState, Pod, Rebuild, Strategy, Trouble, group_state
from headrace_operator.names import (
    REASON_NO_CAPACITY,
    REASON_PAUSED,
    REASON_SCHEDULING_GATED,
    REASON_SHRINKING_FIRST,
    REASON_UNSCHEDULABLE,
)
from headrace_operator.plans import RolePlan
from headrace_operator.rollout import plan_deployment
from headrace_operator.upkeep import BROKEN_GRACE_SECONDS


def noted(plan: RolePlan) -> dict[tuple[str, int], Rebuild]:
    return {(k.revision, k.index): rebuild for k, rebuild in plan.rebuilds}


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
    assert dict(plan.rebuilds)[key("new", 0)] == Rebuild(1, NOW, "pod-0 exited with code 1\nlast words")


def test_a_failed_group_is_made_again_after_its_backoff() -> None:
    waiting = {("new", 0): Rebuild(3, NOW, "")}
    early = plan_role(state({}, rebuilds=waiting), NOW + 3)
    assert early.is_idle
    assert early.wait_seconds is not None
    assert 0 < early.wait_seconds <= 1
    assert created(plan_role(state({}, rebuilds=waiting), NOW + 4)) == [("new", 0, (0,))]


def test_when_someone_deletes_one_pod_its_siblings_follow_and_the_group_returns() -> None:
    plan = plan_role(state({("old", 0): (GOING, pod(1))}, size=2, wanted="old"), NOW)
    assert deleted(plan) == [("uid-1", None)]  # all ranks are there, so the whole group drains
    assert noted(plan)["old", 0].failures == 0


@pytest.mark.parametrize("others", [(replace(FAILED, index=1, uid="uid-1"), pod(2)), (pod(2),)])
def test_nothing_is_drained_from_a_group_that_has_lost_a_rank_too(others: tuple[Pod, ...]) -> None:
    plan = plan_role(state({("new", 0): (GOING, *others)}, size=3), NOW)
    assert {grace for _, grace in deleted(plan)} == {BROKEN_GRACE_SECONDS}


def test_a_policy_that_edits_every_pod_is_met_with_backoff() -> None:
    plan = plan_role(state({("new", 0): (pod(is_edited=True),)}), NOW)
    assert deleted(plan) == [("uid-0", BROKEN_GRACE_SECONDS)]
    assert dict(plan.rebuilds)[key("new", 0)] == Rebuild(1, NOW, "pod pod-0 was edited")
    again = plan_role(state({("new", 0): (pod(is_edited=True),)}, rebuilds=noted(plan)), NOW + 10)
    assert dict(again.rebuilds)[key("new", 0)].failures == 2


def test_a_failure_noted_by_a_clock_that_was_ahead_delays_no_longer_than_any_other() -> None:
    ahead = {("new", 0): Rebuild(3, NOW + 7200, "")}
    plan = plan_role(state({}, rebuilds=ahead), NOW)
    assert plan.wait_seconds is not None
    assert plan.wait_seconds <= 4
    assert created(plan_role(state({}, rebuilds=noted(plan)), NOW + 4)) == [("new", 0, (0,))]


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
    assert noted(plan)["old", 0].failures == 1
    empty = plan_role(state({("new", 1): groups["new", 1]}, replicas=2, rebuilds=noted(plan)), NOW + 5)
    assert created(empty) == [("old", 0, (0,))]


def test_a_group_whose_revision_is_lost_is_replaced_by_the_wanted_one_once_it_fails() -> None:
    groups = {("old", 0): (FAILED,), ("new", 1): (replace(STARTING, index=1, uid="uid-1"),)}
    plan = plan_role(state(groups, replicas=2, known=("new",)), NOW)
    assert plan.leaving == (key("old", 0),)
    gone = plan_role(state({("new", 1): groups["new", 1]}, replicas=2, known=("new",)), NOW)
    assert created(gone) == [("new", 0, (0,))]


@pytest.mark.parametrize(
    ("pods", "victim"),
    [
        ({0: RUNNING, 1: pod(1), 2: pod(2)}, "uid-2"),  # the last of equals
        ({0: STARTING, 1: pod(1), 2: pod(2)}, "uid-0"),  # one that does not serve before one that does
        ({0: STARTING, 1: pod(1, deadline=NOW + 9), 2: pod(2)}, None),  # the one that is going already counts
    ],
)
def test_scaling_down_costs_the_least(pods: dict[int, Pod], victim: str | None) -> None:
    groups = {("new", index): (one,) for index, one in pods.items()}
    plan = plan_role(state(groups, replicas=2), NOW)
    assert deleted(plan) == ([(victim, None)] if victim else [])
    assert len(plan.leaving) == 1


SURGE = Strategy(max_surge=1, max_unavailable=0)


def test_with_surge_the_new_group_comes_first_and_the_old_one_goes_once_it_is_ready() -> None:
    old = {("old", 0): (pod(0),), ("old", 1): (pod(1),)}
    first = plan_role(state(old, replicas=2), NOW, SURGE)
    assert (created(first), deleted(first)) == ([("new", 1, (0,))], [])
    beside = {**old, ("new", 1): (pod(5, ready=False),)}
    assert plan_role(state(beside, replicas=2), NOW, SURGE).is_idle
    beside["new", 1] = (pod(5),)
    second = plan_role(state(beside, replicas=2), NOW, SURGE)
    assert (created(second), deleted(second)) == ([], [("uid-1", None)])
    assert second.leaving == (key("old", 1),)


def test_a_new_group_counts_once_it_has_been_ready_for_long_enough() -> None:
    strategy = replace(SURGE, min_ready_seconds=30)
    groups = {("old", 0): (RUNNING,), ("new", 0): (pod(1, ready_since=NOW - 10),)}
    early = plan_role(state(groups), NOW, strategy)
    assert early.is_idle
    assert early.wait_seconds == pytest.approx(20)
    assert deleted(plan_role(state(groups), NOW + 20, strategy)) == [("uid-0", None)]


def test_going_back_keeps_the_old_group_and_drops_its_successor() -> None:
    groups = {("old", 0): (RUNNING,), ("new", 0): (pod(1, ready=False),)}
    plan = plan_role(state(groups, wanted="old"), NOW, SURGE)
    assert (deleted(plan), created(plan)) == ([("uid-1", None)], [])
    assert plan.leaving == (key("new", 0),)


def test_a_third_revision_replaces_the_second_and_keeps_the_first_until_it_is_ready() -> None:
    groups = {("old", 0): (RUNNING,), ("new", 0): (pod(1, ready=False),)}
    plan = plan_role(state(groups, wanted="third", known=("old", "new", "third")), NOW, SURGE)
    assert deleted(plan) == [("uid-1", None)]
    assert plan.create == ()  # the second still takes the room


def test_an_old_group_that_loses_a_pod_while_its_successor_starts_comes_back() -> None:
    groups = {("old", 0): (FAILED,), ("new", 0): (pod(1, ready=False),)}
    plan = plan_role(state(groups), NOW, SURGE)
    assert noted(plan)["old", 0].failures == 1
    later = plan_role(state({("new", 0): groups["new", 0]}, rebuilds=noted(plan)), NOW + 5, SURGE)
    assert created(later) == [("old", 0, (0,))]


def test_a_full_cluster_takes_one_group_out_where_one_may_be_unavailable() -> None:
    groups = {("old", 0): (RUNNING,), ("old", 1): (pod(1),)}
    strategy = Strategy(max_surge=1, max_unavailable=1)
    plan = plan_deployment([state(groups, replicas=2)], strategy, NOW, lambda key: "no room")["decode"]
    assert (deleted(plan), plan.blocked[0].reason) == ([("uid-1", None)], REASON_NO_CAPACITY)


@pytest.mark.parametrize(
    "reason",
    [None, REASON_UNSCHEDULABLE, REASON_SCHEDULING_GATED],
    ids=["refused", "made and not scheduled", "made and held by a queue whose quota is used up"],
)
def test_a_full_cluster_is_waited_for_unless_it_is_to_be_recreated(reason: str | None) -> None:
    made = pod(7, phase="Pending", ready=False, trouble=Trouble(reason, "no node")) if reason else None
    groups = {("old", 0): (RUNNING,), **({("new", 0): (made,)} if made else {})}
    waiting = plan_deployment([state(groups)], SURGE, NOW, lambda key: "no room")["decode"]
    assert waiting.is_idle
    assert waiting.blocked[-1].message.endswith("set whenFull: Recreate" + (" (no node)" if reason else ""))
    recreating = replace(SURGE, when_full="Recreate")
    plan = plan_deployment([state(groups)], recreating, NOW, lambda key: "no room")["decode"]
    assert deleted(plan) == [("uid-0", None)]
    gone = {k: v for k, v in groups.items() if k[0] == "new"}
    after = plan_role(state({("old", 0): (GOING,), **gone}, leaving=[("old", 0)]), NOW, recreating)
    assert after.rebuilds == ()  # the old one does not come back


def test_a_paused_deployment_repairs_and_scales_and_replaces_nothing() -> None:
    groups = {("old", 0): (RUNNING,), ("old", 1): (replace(FAILED, uid="uid-1"),)}
    plan = plan_role(state(groups, replicas=3), NOW, Strategy(is_paused=True))
    assert deleted(plan) == [("uid-1", BROKEN_GRACE_SECONDS)]
    assert created(plan) == [("old", 2, (0,))]  # of the revision that serves
    assert plan.blocked[0].reason == REASON_PAUSED


def test_a_partition_leaves_so_many_groups_at_their_revision() -> None:
    world = World(Strategy(partition=2))
    world.settle({"decode": Wanted("a", 3)})
    for _ in range(20):
        world.step({"decode": Wanted("b", 3)})
    assert (world.num_ready(revision="a"), world.num_ready(revision="b")) == (2, 1)
    for _ in range(20):
        world.step({"decode": Wanted("b", 4)})
    assert (world.num_ready(revision="a"), world.num_ready(revision="b")) == (2, 2)


def test_of_two_groups_in_a_slot_the_wanted_revision_stays_once_it_is_ready() -> None:
    groups = {("old", 0): (RUNNING,), ("new", 0): (replace(STARTING, uid="uid-9"),)}
    assert plan_role(state(groups), NOW).is_idle
    groups["new", 0] = (replace(RUNNING, uid="uid-9"),)
    assert deleted(plan_role(state(groups), NOW)) == [("uid-0", None)]


FORMING = (STARTING,)
SURGE_AND_GAP = {("old", 0): (RUNNING,), ("new", 0): FORMING}  # and nothing at slot 1


@pytest.mark.parametrize(
    ("groups", "gone"),
    [
        (SURGE_AND_GAP, [("new", 0)]),
        ({**SURGE_AND_GAP, ("old", 0): FORMING}, [("old", 0)]),  # it serves nobody either, and is old
        ({**SURGE_AND_GAP, ("old", 1): (GOING,)}, []),  # room comes anyway
        ({("old", 0): (RUNNING,), ("old", 1): (RUNNING,), ("new", 1): FORMING}, []),  # no slot is short
    ],
    ids=["the new one", "the old one that is not ready", "none while room comes", "none when no slot is short"],
)
def test_of_two_groups_of_a_slot_one_gives_its_room_to_a_slot_that_finds_none(
    groups: dict[tuple[str, int], tuple[Pod, ...]], gone: list[tuple[str, int]]
) -> None:
    strategy = Strategy(max_surge=1, max_unavailable=0)
    plan = plan_deployment([state(groups, replicas=2)], strategy, NOW, lambda key: "there is no room")["decode"]
    assert [(k.revision, k.index) for k in plan.leaving] == gone
    assert [note.reason for note in plan.notes] == ["SurgeGivenBack"] * len(gone)


def test_while_a_slot_holds_two_groups_that_no_surge_allows_another_role_does_not_grow() -> None:
    """Left of an earlier change. The spec asks for 2 x 4 + 3 x 4 GPUs; three prefill groups and two decode groups are
    there, which are as many."""
    prefill = {("old", 0): (pod(ready=False),), ("new", 0): (pod(1, ready=False),), ("new", 1): (pod(2),)}
    decode = {("new", 0): (pod(3),), ("new", 1): (pod(4),)}
    plans = plan_deployment(
        [
            state(prefill, role="prefill", replicas=2, gpus=4),
            state(decode, role="decode", replicas=3, gpus=4),
        ],
        Strategy(),
        NOW,
    )
    assert created(plans["decode"]) == []
    assert [trouble.reason for trouble in plans["decode"].blocked] == [REASON_SHRINKING_FIRST]


ONE_OLD = {("old", 0): (pod(9),)}


def test_no_role_surges_while_another_shrinks() -> None:
    surplus = state({("new", i): (pod(i),) for i in range(3)}, role="prefill", replicas=1, gpus=4)
    alone = replace(surplus, groups={key("new", 0, "prefill"): (pod(0),)})
    for prefill, made in ((surplus, []), (alone, [("new", 0, (0,))])):
        plans = plan_deployment([prefill, state(ONE_OLD, gpus=4)], SURGE, NOW)
        assert created(plans["decode"]) == made


def test_no_role_surges_while_another_waits_to_make_a_group_again() -> None:
    """The room that it has left is owed to it."""
    failed = {("new", 0): Rebuild(3, NOW, "")}
    waiting = state({}, role="prefill", rebuilds=failed, gpus=4)
    plans = plan_deployment([waiting, state(ONE_OLD, gpus=4)], SURGE, NOW)
    assert created(plans["decode"]) == []
