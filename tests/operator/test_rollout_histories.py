"""The planner, whole histories: faults, full clusters and changes of mind, and what holds at every step of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.role_worlds import Wanted, World

from headrace_operator.groups import GroupState, Strategy
from headrace_operator.leeway import Percent
from headrace_operator.names import REASON_NO_CAPACITY, REASON_WAITING_FOR_PAIR
from headrace_operator.plans import RolePlan

ONE = {"decode": Wanted("a", 3)}


@dataclass(frozen=True)
class Event:
    """For some steps the spec is this, after a pod was lost perhaps, and some groups became unready."""

    revision: str
    prefill: int
    decode: int
    num_steps: int
    lost_pod: int | None
    unready: tuple[int, ...]


EVENTS = st.builds(
    Event,
    revision=st.sampled_from(["a1", "a2", "b1"]),  # the first letter is the KV fingerprint
    prefill=st.integers(0, 4),
    decode=st.integers(0, 4),
    num_steps=st.integers(0, 6),
    lost_pod=st.none() | st.integers(0, 100),
    unready=st.lists(st.integers(0, 100), max_size=3).map(tuple),
)
AMOUNTS = st.integers(0, 2) | st.sampled_from([Percent(value) for value in (0, 25, 50, 100)])
STRATEGIES = st.builds(
    Strategy,
    max_surge=AMOUNTS,
    max_unavailable=AMOUNTS,
    when_full=st.sampled_from(["Wait", "Recreate"]),
    min_ready_seconds=st.sampled_from([0.0, 2.0]),
    partition=st.sampled_from([0, 0, 1, 2]),
).filter(lambda s: not {s.max_surge, s.max_unavailable} <= {0, Percent(0)})


def check_step(world: World, wanted: dict[str, Wanted]) -> None:
    """One step, and all that must hold whatever came before."""
    reordered = replace(world, groups=dict(reversed(world.groups.items()))).plan(wanted)
    counts = {role: world.num_groups(role) for role in wanted}
    gpus = world.gpus_in_use()
    before = {role: world.available_slots(role) for role in wanted}
    check_motion(world, wanted, reordered)
    plans = world.step(wanted)
    assert reordered == plans
    for role, want in wanted.items():
        plan = plans[role]
        gone = {deletion.uid for deletion in plan.delete}
        left = available_slots(plan, gone)
        may = world.leeway(want)
        allowed = may.max_unavailable
        if world.strategy.when_full == "Recreate" and world.capacity is not None:
            allowed = max(1, allowed)
        had = sum(slot.index in before[role] for slot in plan.slots)
        assert len(left) >= min(had, want.replicas - allowed), "a roll-out took too much away"
        assert world.num_groups(role) <= max(counts[role], want.replicas + may.max_surge)
        assert len({(k.revision, k.index) for k in world.groups if k.role == role}) == world.num_groups(role)
    asked = sum(want.replicas * want.gpus for want in wanted.values())
    surge = sum(world.leeway(want).max_surge * want.gpus for want in wanted.values())
    assert world.gpus_in_use() <= max(gpus, asked + surge)
    assert world.capacity is None or world.gpus_in_use() <= max(gpus, world.capacity)


def available_slots(plan: RolePlan, gone: set[str]) -> set[int]:
    """Slots of the plan with an available group none of whose pods is in `gone`."""
    return {
        slot.index
        for slot in plan.slots
        for group in slot.groups
        if group.is_available and not any(pod.uid in gone for pod in group.pods)
    }


def check_motion(world: World, wanted: dict[str, Wanted], plans: dict[str, RolePlan]) -> None:
    """Something is going on, or all is as wanted, or the plan says why not."""
    is_moving = any(plan.create or plan.delete or plan.wait_seconds is not None for plan in plans.values()) or any(
        world.state_of(k) is not GroupState.READY for k in world.groups
    )
    assert is_moving or world.is_as_wanted(wanted) or any(plan.blocked for plan in plans.values())


def wanted_of(event: Event, sizes: tuple[int, int], seen: dict[tuple[str, str], Wanted]) -> dict[str, Wanted]:
    prefill = Wanted(event.revision, event.prefill, sizes[0], gpus=sizes[0])
    decode = Wanted(event.revision, event.decode, sizes[1], gpus=sizes[1])
    return {"prefill": prefill, "decode": decode}


def run_history(
    strategy: Strategy,
    sizes: tuple[int, int],
    events: list[Event],
    spare: int | None = None,
    drain_steps: int = 0,
    num_settle: int = 400,
) -> None:
    world = World(strategy, drain_steps=drain_steps)
    for event in events:
        wanted = wanted_of(event, sizes, world.shapes)
        if event.lost_pod is not None:
            world.lose_pod(event.lost_pod)
        for number in event.unready:
            world.make_unready(number)
        asked = sum(want.replicas * want.gpus for want in wanted.values())
        # What is there stays there; what is asked for fits, and `spare` GPUs beside.
        world.capacity = None if spare is None else max(asked, world.gpus_in_use()) + spare
        for _ in range(event.num_steps):
            check_step(world, wanted)
    wanted = wanted_of(events[-1], sizes, world.shapes)
    for _ in range(num_settle):
        check_step(world, wanted)
        if world.is_settled(wanted):
            return
    # What has no room beside the old, or no partner because a partition keeps that one old, is not replaced, which is
    # said; but nothing is missing.
    reasons = {trouble.reason for plan in world.plans.values() for trouble in plan.blocked}
    has_no_room = world.capacity is not None and strategy.when_full == "Wait"
    has_no_room &= any(world.leeway(want).max_unavailable == 0 for want in wanted.values())
    expected = {REASON_NO_CAPACITY} if has_no_room else set()
    expected |= {REASON_WAITING_FOR_PAIR} if strategy.partition else set()
    assert reasons & expected, f"not settled: {world.groups} {world.plans}"
    assert all(world.num_ready(role) >= want.replicas for role, want in wanted.items())


@settings(max_examples=60, deadline=None)
@given(
    STRATEGIES,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.lists(EVENTS, min_size=1, max_size=5),
    st.integers(0, 2),
)
def test_any_history_with_room_keeps_its_bounds_and_ends_with_what_is_wanted(
    strategy: Strategy, sizes: tuple[int, int], events: list[Event], drain_steps: int
) -> None:
    run_history(strategy, sizes, events, drain_steps=drain_steps)


@settings(max_examples=40, deadline=None)
@given(
    STRATEGIES,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.lists(EVENTS, min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_any_history_on_a_nearly_full_rack_keeps_its_bounds_and_ends_or_says_why_not(
    strategy: Strategy, sizes: tuple[int, int], events: list[Event], spare: int
) -> None:
    run_history(strategy, sizes, events, spare, num_settle=100)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    STRATEGIES,
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.lists(EVENTS, min_size=1, max_size=8),
    st.none() | st.integers(0, 16),
    st.integers(0, 3),
)
def test_long_histories(
    strategy: Strategy, sizes: tuple[int, int], events: list[Event], spare: int | None, drain_steps: int
) -> None:
    run_history(strategy, sizes, events, spare, drain_steps)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_rollout_never_takes_more_than_one_group_out_and_makes_every_group_once(replicas: int) -> None:
    world = World()
    world.settle({"decode": Wanted("a", replicas, size=2)})
    lowest = replicas
    for _ in range(40):
        world.step({"decode": Wanted("b", replicas, size=2)})
        lowest = min(lowest, world.num_ready())
    assert world.is_settled({"decode": Wanted("b", replicas, size=2)})
    assert lowest == replicas - 1
    assert world.num_made == 2 * 2 * replicas


def test_with_surge_a_single_group_is_replaced_without_a_gap() -> None:
    world = World(Strategy(max_surge=1, max_unavailable=0))
    world.settle({"decode": Wanted("a", 1)})
    while not world.is_settled({"decode": Wanted("b", 1)}):
        world.step({"decode": Wanted("b", 1)})
        assert world.num_ready() >= 1
    assert world.now < 30


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(max_surge=1, max_unavailable=0)], ids=["in place", "surge"])
def test_a_bad_revision_costs_one_group_at_most_and_a_revert_brings_it_back(strategy: Strategy) -> None:
    world = World(strategy, bad=frozenset("b"))
    world.settle({"decode": Wanted("a", 3)})
    for _ in range(300):
        world.step({"decode": Wanted("b", 3)})
        assert world.num_ready(revision="a") >= 3 - strategy.max_unavailable
    before = world.num_made
    for _ in range(60):
        world.step({"decode": Wanted("b", 3)})
    assert world.num_made - before <= 2  # at most one try a minute by now
    made = world.num_made
    world.settle({"decode": Wanted("a", 3)})
    assert world.num_made - made == strategy.max_unavailable  # what still served is kept


def test_three_revisions_in_a_row_keep_groups_that_serve() -> None:
    world = World()
    world.settle({"decode": Wanted("a", 4)})
    for revision in "bcbc":
        for _ in range(3):
            world.step({"decode": Wanted(revision, 4)})
            assert world.num_ready() >= 3
    world.settle({"decode": Wanted("c", 4)})


def test_a_rollout_with_all_old_groups_unready_finishes() -> None:
    world = World(bad=frozenset("a"))
    for _ in range(20):
        world.step({"decode": Wanted("a", 3)})
    world.settle({"decode": Wanted("b", 3)})


def test_surge_is_given_back_for_a_slot_that_finds_no_room() -> None:
    """Eight GPUs: one new group comes up beside an old one, and does not get ready; then another role loses its group,
    and a neighbour has taken what it leaves."""
    strategy = Strategy(max_surge=1, max_unavailable=1)
    world = World(strategy, hangs=frozenset("b"), capacity=9)
    world.settle(pd(4, 1))
    for _ in range(4):
        world.step(pd(4, 1, "b1"))
    assert (world.num_groups("prefill"), world.num_groups("decode")) == (5, 1)
    world.lose_group("decode")
    world.capacity = 8
    for _ in range(6):
        world.step(pd(4, 1, "b1"))
        assert world.num_ready("prefill", "a1") >= 3
    assert (world.num_groups("prefill"), world.num_groups("decode")) == (4, 1)


def pd(prefill: int, decode: int, revision: str = "a1") -> dict[str, Wanted]:
    """Prefill groups of 1 GPU, decode groups of 4."""
    return {"prefill": Wanted(revision, prefill), "decode": Wanted(revision, decode, size=2, gpus=4)}


def test_a_change_of_the_ratio_shrinks_before_it_grows() -> None:
    world = World(capacity=12)
    world.settle(pd(8, 1))
    while not world.is_settled(pd(4, 2)):
        world.step(pd(4, 2))
        assert world.gpus_in_use() <= 12
        assert world.num_ready("prefill") >= 4
        assert world.num_ready("decode") >= 1
        assert world.now < 30


def test_growth_that_waits_says_for_what() -> None:
    world = World()
    world.settle(pd(8, 1))
    plan = world.step(pd(4, 2))["decode"]
    assert not plan.create
    assert "it needs 4 GPUs, and 12 of 12 are in use" in plan.blocked[0].message


@pytest.mark.parametrize("shape", [(8, 1), (8, 2), (2, 2), (1, 4), (3, 4)])
@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(max_surge=1, max_unavailable=0), Strategy(max_surge=1, max_unavailable=1)],
    ids=["in place", "surge", "both"],
)
def test_a_new_kv_fingerprint_always_leaves_a_pair_that_fits(shape: tuple[int, int], strategy: Strategy) -> None:
    world = World(strategy)
    world.settle(pd(*shape))
    is_interrupted = False
    while not world.is_settled(pd(*shape, "b1")):
        world.step(pd(*shape, "b1"))
        pairs = [
            fingerprint
            for fingerprint in ("a1", "b1")
            if world.num_ready("prefill", fingerprint) and world.num_ready("decode", fingerprint)
        ]
        is_interrupted |= not pairs
        assert world.now < 200
    # A role of one group that may not surge has to go down once, whatever the order.
    assert is_interrupted == (1 in shape and strategy.max_surge == 0)


def test_both_sides_of_a_new_kv_fingerprint_stay_within_the_ratio() -> None:
    world = World(Strategy(max_surge=1, max_unavailable=0))
    world.settle(pd(8, 1))
    while not world.is_settled(pd(8, 1, "b1")):
        world.step(pd(8, 1, "b1"))
        if world.num_ready("prefill", "a1"):
            assert world.num_ready("decode", "a1") == 1
        if world.num_ready("prefill", "b1") > 1:
            assert world.num_ready("decode", "b1") == 1
