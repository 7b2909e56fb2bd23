"""When groups move between prefill and decode, how many, and what keeps them from it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_operator.balance import (
    MAX_BACKOFF,
    MAX_GAP_SECONDS,
    RELIEF,
    Memory,
    Rules,
    Side,
    State,
    Verdict,
    balance,
    fitted,
)
from headrace_operator.pressure import Pressed, Signal

NOW = 1_000_000.0
RULES = Rules(gpu_budget=8, hold_seconds=60, cooldown_seconds=300)
HELD = Memory(short="prefill", since=NOW - 60, seen=NOW - 20)


def side(name: str, replicas: int, pressure: float | None = 0.5, load: float = 0.5, **fields: object) -> Side:
    """A role that is as it should be, of groups of one GPU."""
    known = None if pressure is None else Pressed((Signal("s", "{value} of {target}", pressure, 1.0),), load)
    whole = Side(name, replicas, replicas, replicas, 1, 100, 1, known)
    return replace(whole, **fields)  # type: ignore[arg-type]


def look(prefill: Side, decode: Side, memory: Memory = HELD, rules: Rules = RULES, now: float = NOW) -> Verdict:
    return balance(prefill, decode, rules, memory, now)


SHORT = side("prefill", 4, pressure=1.5, load=0.9)
IDLE = side("decode", 4, pressure=0.3, load=0.3)


def test_no_role_is_short() -> None:
    verdict = look(side("prefill", 4, 1.0), side("decode", 4, 0.9))
    assert verdict.state is State.BALANCED
    assert verdict.replicas == {"prefill": 4, "decode": 4}
    assert verdict.memory == Memory()


def test_a_role_that_has_been_short_for_long_enough_gets_what_the_other_can_spare() -> None:
    verdict = look(SHORT, IDLE)
    assert verdict.state is State.MOVED
    assert verdict.replicas == {"prefill": 5, "decode": 3}
    assert verdict.memory == Memory(
        moved_at=NOW, moved_to="prefill", moved_why=verdict.message, num_got=1, num_given=1, pressure=1.5
    )
    assert verdict.message == (
        "prefill goes from 4 to 5 groups, decode from 4 to 3; "
        "prefill is at 1.50 of its targets: 1.5 of 1; decode is at 0.30 of its targets: 0.3 of 1"
    )


def test_the_roles_are_treated_alike() -> None:
    memory = replace(HELD, short="decode")
    verdict = look(replace(IDLE, name="prefill"), replace(SHORT, name="decode"), memory)
    assert verdict.replicas == {"prefill": 3, "decode": 5}


@pytest.mark.parametrize(
    ("load", "idle", "moved"),
    [
        (0.5, 0.1, 1),  # only a time is too long: one more, and look again
        (1.1, 0.1, 2),  # 4 groups at 1.1 are 6 at 0.8, with a little room
        (9.0, 0.1, 3),  # at most as many as it has, and decode keeps one
        (9.0, 0.5, 1),  # 4 groups at 0.5 are 3 at 0.67, but 2 at 1.0
    ],
)
def test_the_load_says_how_many_move_and_the_givers_load_how_many_it_spares(
    load: float, idle: float, moved: int
) -> None:
    verdict = look(side("prefill", 4, 1.5, load), side("decode", 4, 0.5, idle))
    assert verdict.replicas == {"prefill": 4 + moved, "decode": 4 - moved}


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (SHORT, side("decode", 4, 0.9, 0.3), "decode is at 0.90 of its targets itself, over 0.8"),
        (SHORT, side("decode", 2, 0.6, 0.6), "decode would be at 1.20 of what 1 groups can do, over 0.8"),
        (SHORT, side("decode", 1, 0.1, 0.1), "decode would have 0 groups without the 1 to give, of 1 at the least"),
        (SHORT, replace(IDLE, min_replicas=4), "decode would have 3 groups without the 1 to give, of 4 at the least"),
        (replace(SHORT, max_replicas=4), IDLE, "prefill is short and has its maxReplicas, 4"),
        (SHORT, side("decode", 4, 1.4, 0.9), "decode is at 1.40 of its targets itself, over 0.8"),
    ],
)
def test_where_there_is_nothing_to_give_it_says_so(prefill: Side, decode: Side, why: str) -> None:
    used = prefill.replicas + decode.replicas
    verdict = look(prefill, decode, rules=replace(RULES, gpu_budget=used))
    assert verdict.state is State.LIMITED
    assert why in verdict.message
    assert verdict.replicas == {"prefill": prefill.replicas, "decode": decode.replicas}
    assert verdict.memory == Memory()


def test_what_is_free_of_the_budget_is_given_first() -> None:
    verdict = look(side("prefill", 2, 1.5, 1.2), side("decode", 4, 0.9), rules=replace(RULES, gpu_budget=7))
    assert verdict.replicas == {"prefill": 3, "decode": 4}


def test_a_large_group_makes_room_for_several_small_ones_and_none_is_left_idle() -> None:
    decode = side("decode", 2, 0.2, 0.2, gpus=32)
    verdict = look(side("prefill", 8, 1.5, 0.9, gpus=4), decode, rules=replace(RULES, gpu_budget=96))
    assert verdict.replicas == {"prefill": 16, "decode": 1}


def test_several_small_groups_make_room_for_a_large_one() -> None:
    prefill = side("prefill", 12, 0.2, 0.2, gpus=4)
    memory = replace(HELD, short="decode")
    verdict = look(prefill, side("decode", 1, 1.5, 0.9, gpus=32), memory, replace(RULES, gpu_budget=84))
    assert verdict.replicas == {"prefill": 5, "decode": 2}, "4 GPUs were free: 28 are given"


# --- hysteresis ---


def test_a_need_must_last() -> None:
    first = look(SHORT, IDLE, Memory())
    assert (first.state, first.memory) == (State.HOLDING, Memory("prefill", NOW, NOW))
    later = look(SHORT, IDLE, first.memory, now=NOW + 45)
    assert (later.state, later.memory) == (State.HOLDING, Memory("prefill", NOW, NOW + 45))
    assert look(SHORT, IDLE, later.memory, now=NOW + 60).state is State.MOVED


@pytest.mark.parametrize("between", [side("prefill", 4, 0.9), replace(SHORT, num_ready=3)], ids=["well", "not whole"])
def test_a_need_begins_anew_once_it_was_gone_or_could_not_be_told(between: Side) -> None:
    memory = look(SHORT, IDLE, Memory()).memory
    memory = look(between, IDLE, memory, now=NOW + 30).memory
    assert look(SHORT, IDLE, memory, now=NOW + 60).state is State.HOLDING


def test_the_other_roles_need_is_another() -> None:
    assert look(SHORT, IDLE, replace(HELD, short="decode")).memory == Memory("prefill", NOW, NOW)


def test_a_need_goes_on_over_a_restart_but_not_over_a_long_silence() -> None:
    missing = side("prefill", 4, None)
    kept = look(missing, IDLE, HELD)
    assert (kept.state, kept.memory) == (State.UNKNOWN, HELD)
    assert look(SHORT, IDLE, kept.memory, now=NOW + MAX_GAP_SECONDS - 20).state is State.MOVED
    assert look(SHORT, IDLE, kept.memory, now=NOW + MAX_GAP_SECONDS + 1).state is State.HOLDING


@pytest.mark.parametrize("unknown", [(None, 0.3), (1.5, None), (None, None)])
def test_nothing_moves_on_what_is_not_known(unknown: tuple[float | None, float | None]) -> None:
    verdict = look(side("prefill", 4, unknown[0]), side("decode", 4, unknown[1]))
    assert (verdict.state, verdict.replicas) == (State.UNKNOWN, {"prefill": 4, "decode": 4})


@pytest.mark.parametrize("fields", [{"num_ready": 3}, {"num_groups": 5}, {"num_groups": 3, "num_ready": 3}])
def test_nothing_moves_while_groups_come_or_go(fields: dict[str, int]) -> None:
    verdict = look(SHORT, replace(IDLE, **fields))  # type: ignore[arg-type]
    assert verdict.state is State.SETTLING
    assert verdict.message.startswith("decode has ")


# --- cool-down ---


@pytest.mark.parametrize(
    ("moved_to", "num_reversals", "wait"),
    [
        ("prefill", 0, 300),  # the same way again
        ("decode", 0, 600),  # a move back
        ("decode", 1, 1200),
        ("decode", 9, 300 * MAX_BACKOFF),
        ("prefill", 9, 300),
    ],
)
def test_moves_wait_for_the_last_one_to_show_and_moves_back_for_longer(
    moved_to: str, num_reversals: int, wait: float
) -> None:
    memory = replace(HELD, moved_at=NOW - wait + 1, moved_to=moved_to, num_reversals=num_reversals)
    early = look(SHORT, IDLE, memory)
    assert early.state is State.COOLING
    assert f"{wait:.0f} s after the last move" in early.message
    late = look(SHORT, IDLE, replace(memory, moved_at=NOW - wait))
    assert late.state is State.MOVED
    assert late.memory.num_reversals == num_reversals + (moved_to == "decode")


def test_what_was_moved_long_ago_is_forgotten() -> None:
    memory = replace(HELD, moved_at=NOW - 32 * 300, moved_to="decode", num_reversals=3)
    verdict = look(SHORT, IDLE, memory)
    assert (verdict.state, verdict.memory.num_reversals) == (State.MOVED, 0)


# --- undoing ---

UNDONE = Memory("decode", NOW - 60, NOW - 20, NOW - 300, "prefill", num_got=2, num_given=1, pressure=1.5)
HURT = side("decode", 3, 2.0, 0.5)


def test_a_move_that_hurt_the_giver_more_than_it_helped_is_undone_and_not_tried_again() -> None:
    verdict = look(side("prefill", 6, 0.7, 0.79), HURT, UNDONE, replace(RULES, gpu_budget=9))
    assert verdict.replicas == {"prefill": 4, "decode": 4}, "though prefill would not have given that much"
    assert "decode goes from 3 to 4 groups, prefill from 6 to 4, as before the last move" in verdict.message
    (floor,) = verdict.memory.floors
    assert (floor.role, floor.replicas, verdict.memory.num_given) == ("decode", 4, 0)
    memory = replace(verdict.memory, short="prefill", since=NOW + 8000, seen=NOW + 8050)
    later = look(SHORT, IDLE, memory, now=NOW + 8100)
    assert later.state is State.LIMITED
    assert "decode would have 3 groups without the 1 to give, of 4 at the least" in later.message
    memory = replace(memory, since=NOW + 9600, seen=NOW + 9650)
    assert look(SHORT, IDLE, memory, now=NOW + 9700).state is State.MOVED


@pytest.mark.parametrize(
    ("decode", "memory", "rules"),
    [
        (replace(HURT, pressed=Pressed((Signal("s", "{value}", 1.4, 1.0),), 0.5)), UNDONE, RULES),  # less than before
        (HURT, replace(UNDONE, num_given=0), RULES),  # it gave nothing
        (HURT, replace(UNDONE, moved_to="decode"), RULES),
        (replace(HURT, max_replicas=3), UNDONE, RULES),
        (replace(HURT, gpus=8), UNDONE, replace(RULES, gpu_budget=30)),  # a template changed: it would not fit
    ],
)
def test_other_moves_are_not_undone(decode: Side, memory: Memory, rules: Rules) -> None:
    budget = max(rules.gpu_budget, 6 + 3 * decode.gpus)
    verdict = look(side("prefill", 6, 0.7, 0.79), decode, memory, replace(rules, gpu_budget=budget))
    assert verdict.state is State.LIMITED


# --- bounds ---


@pytest.mark.parametrize(
    ("prefill", "decode", "budget", "expected"),
    [
        (side("prefill", 4), side("decode", 4), 8, (4, 4)),
        (side("prefill", 4), side("decode", 4), 6, (3, 3)),
        (side("prefill", 6), side("decode", 1), 4, (3, 1)),
        (side("prefill", 0), side("decode", 2, min_replicas=3), 8, (1, 3)),
        (side("prefill", 9, max_replicas=5), side("decode", 1), 8, (5, 1)),
        (side("prefill", 8, gpus=4), side("decode", 2, gpus=32), 72, (8, 1)),
        (side("prefill", 2, min_replicas=2), side("decode", 3, min_replicas=3), 4, (2, 3)),  # which the rules refuse
    ],
)
def test_counts_are_brought_within_bounds_and_budget(
    prefill: Side, decode: Side, budget: int, expected: tuple[int, int]
) -> None:
    assert tuple(fitted(prefill, decode, budget).values()) == expected


# --- whatever is measured ---

PRESSURES = st.one_of(st.none(), st.floats(0, 4))
LOADS = st.floats(0, 4)


@st.composite
def roles(draw: st.DrawFn) -> tuple[Side, Side, Rules]:
    sides = []
    for name in ("prefill", "decode"):
        least, more, room = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 5))
        count = least + more
        limits = {"min_replicas": least, "max_replicas": count + room, "gpus": draw(st.sampled_from([1, 2, 4, 32]))}
        sides.append(side(name, count, draw(PRESSURES), draw(LOADS), **limits))
    used = sum(s.replicas * s.gpus for s in sides)
    return sides[0], sides[1], Rules(used + draw(st.integers(0, 40)), 60, 300)


@settings(max_examples=60, deadline=None)
@given(roles(), st.integers(0, 1))
def test_every_verdict_is_within_bounds_and_takes_from_one_role_at_most(
    given_roles: tuple[Side, Side, Rules], short: int
) -> None:
    prefill, decode, rules = given_roles
    memory = replace(HELD, short=("prefill", "decode")[short])
    verdict = balance(prefill, decode, rules, memory, NOW)
    assert verdict == balance(prefill, decode, rules, memory, NOW)
    counts = verdict.replicas
    for each in (prefill, decode):
        assert each.min_replicas <= counts[each.name] <= each.max_replicas
    assert counts["prefill"] * prefill.gpus + counts["decode"] * decode.gpus <= rules.gpu_budget
    changed = {each.name for each in (prefill, decode) if counts[each.name] != each.replicas}
    assert bool(changed) == (verdict.state is State.MOVED)
    if verdict.state is not State.MOVED:
        return
    (to,) = [each for each in (prefill, decode) if counts[each.name] > each.replicas]
    assert to.pressed
    assert to.pressed.pressure > 1
    for giver in (prefill, decode):
        if counts[giver.name] < giver.replicas:
            assert giver.pressed
            assert giver.pressed.pressure <= RELIEF
            assert giver.pressed.load * giver.replicas <= RELIEF * counts[giver.name] + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    work=st.tuples(st.floats(0.1, 12), st.floats(0.1, 12)),
    counts=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_with_one_load_it_comes_to_rest_and_never_moves_back(
    work: tuple[float, float], counts: tuple[int, int]
) -> None:
    """Pressures that are proportional to work and inverse to groups, as loads are; no time but the moves' own."""
    replicas = {"prefill": counts[0], "decode": counts[1]}
    rules = Rules(sum(counts), 0, 0)
    memory, directions, now = Memory(), set(), NOW
    for _ in range(20):
        sides = [
            side(name, replicas[name], amount / replicas[name], amount / replicas[name])
            for name, amount in zip(replicas, work, strict=True)
        ]
        verdict = balance(sides[0], sides[1], rules, memory, now)
        memory, replicas, now = verdict.memory, dict(verdict.replicas), now + 1
        if verdict.state is not State.MOVED:
            break
        directions.add(memory.moved_to)
    assert verdict.state in (State.BALANCED, State.LIMITED)
    assert len(directions) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_engines_say_moves_are_a_cooldown_apart_and_few_go_back_and_forth(seed: int) -> None:
    """The worst case: pressures that have nothing to do with what is done, and loads that never keep from giving."""
    rules = Rules(8, 0, 300)
    random = Random(seed)
    replicas, memory, now = {"prefill": 4, "decode": 4}, Memory(), NOW
    moves: list[tuple[float, str]] = []
    for _ in range(60):
        sides = [side(name, count, random.uniform(0, 3), 0.0) for name, count in replicas.items()]
        verdict = balance(sides[0], sides[1], rules, memory, now)
        if verdict.state is State.MOVED:
            moves.append((now, verdict.memory.moved_to))
        memory, replicas, now = verdict.memory, dict(verdict.replicas), now + 100
    for (before, _), (after, _) in pairwise(moves):
        assert after - before >= 300
    turns = sum(to != then_to for (_, to), (_, then_to) in pairwise(moves))
    assert turns <= 8, "in 20 cool-downs: each undone move leaves a floor, each move back doubles the wait"
