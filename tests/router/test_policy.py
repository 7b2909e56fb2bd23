"""The choice of a group, as a table, and what must hold for any fleet and any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.router.policy import (
    CLOSED,
    FIRST_COOL_DOWN_SECONDS,
    MAX_COOL_DOWN_SECONDS,
    Candidate,
    Choice,
    Circuit,
    NoChoice,
    choose,
)

NOW = 100.0
OPEN = Circuit(1, NOW + 0.4)
COOLED = Circuit(1, NOW - 1)


def group(name: str, num_live: int = 0, **kwargs) -> Candidate:
    return Candidate(name, num_live, **kwargs)


CHOICES = {
    "the fewest live requests": ([group("a", 2), group("b", 1), group("c", 3)], {}, "b"),
    "among equals the one chosen longest ago": ([group("a", 1, last_turn=7), group("b", 1, last_turn=4)], {}, "b"),
    "load goes before turn": ([group("a", 0, last_turn=9), group("b", 1, last_turn=1)], {}, "a"),
    "not one that failed this request": ([group("a", 0), group("b", 5)], {"tried": {"a"}}, "b"),
    "rather not one of a failed attempt": ([group("a", 0), group("b", 5)], {"avoid": {"a"}}, "b"),
    "but one of a failed attempt if no other is left": (
        [group("a", 0), group("b", 5)],
        {"avoid": {"a"}, "tried": {"b"}},
        "a",
    ),
    "not one that is not ready": ([group("a", 0, ready=False), group("b", 5)], {}, "b"),
    "not one that cools down": ([group("a", 0, circuit=OPEN), group("b", 5)], {}, "b"),
    "one that has cooled down, on trial": ([group("a", 0, circuit=COOLED), group("b", 5)], {}, "a"),
    "not one whose trial is under way": ([group("a", 1, circuit=COOLED, on_trial=True), group("b", 5)], {}, "b"),
    "one that has a partner": ([group("a", 0, unpaired=True), group("b", 5)], {}, "b"),
    "one that has a partner, even if it took part in a failure": (
        [group("a", 0, unpaired=True), group("b", 5)],
        {"avoid": {"b"}},
        "b",
    ),
    "one without a partner if there is no other": ([group("a", 0, unpaired=True)], {}, "a"),
    "not one of another fingerprint": ([group("a", 0, refuses=True), group("b", 5)], {}, "b"),
}


@pytest.mark.parametrize(("candidates", "arguments", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_choice(candidates, arguments, expected):
    assert choose(candidates, now=NOW, **arguments) == Choice(expected)


REFUSALS = {
    "no group at all": ([], {}, "there are none", 1.0),
    "all cool down: come back when the first is open": (
        [group("a", circuit=OPEN), group("b", circuit=Circuit(3, NOW + 2))],
        {},
        "of 2: 2 cooling down after a connection failure",
        0.4,
    ),
    "a mixture is counted": (
        [group("a", ready=False), group("b"), group("c", refuses=True)],
        {"tried": {"b"}},
        "of 3: 1 not ready, 1 failed this request, 1 of another KV fingerprint",
        1.0,
    ),
}


@pytest.mark.parametrize(("candidates", "arguments", "reason", "retry_after"), REFUSALS.values(), ids=REFUSALS.keys())
def test_no_choice_says_why_and_when_to_come_back(candidates, arguments, reason, retry_after):
    answer = choose(candidates, now=NOW, **arguments)
    assert isinstance(answer, NoChoice)
    assert answer.reason == reason
    assert answer.retry_after_seconds == pytest.approx(retry_after)


@given(num_groups=st.integers(1, 8), num_requests=st.integers(1, 60))
def test_requests_that_never_end_are_spread_within_one(num_groups, num_requests):
    live = dict.fromkeys((f"g{index}" for index in range(num_groups)), 0)
    for _ in range(num_requests):
        answer = choose([group(name, count) for name, count in live.items()], now=NOW)
        assert isinstance(answer, Choice)
        live[answer.name] += 1
    assert max(live.values()) - min(live.values()) <= 1


@given(num_groups=st.integers(1, 8), num_requests=st.integers(1, 60))
def test_requests_that_end_at_once_rotate(num_groups, num_requests):
    turns = dict.fromkeys((f"g{index}" for index in range(num_groups)), 0)
    counts = dict.fromkeys(turns, 0)
    for turn in range(1, num_requests + 1):
        answer = choose([group(name, last_turn=last) for name, last in turns.items()], now=NOW)
        assert isinstance(answer, Choice)
        turns[answer.name] = turn
        counts[answer.name] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


candidates_strategy = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdef"),
        num_live=st.integers(0, 5),
        last_turn=st.integers(0, 9),
        ready=st.booleans(),
        circuit=st.builds(Circuit, st.integers(1, 3), st.floats(NOW - 5, NOW + 5)) | st.just(CLOSED),
        on_trial=st.booleans(),
        refuses=st.booleans(),
        unpaired=st.booleans(),
    ),
    unique_by=lambda candidate: candidate.name,
    max_size=6,
)


@given(candidates_strategy, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_what_is_chosen_is_always_usable_and_no_usable_group_is_ever_passed_over(candidates, tried, avoid):
    def usable(c: Candidate) -> bool:
        trial = c.circuit.num_failures > 0 and c.on_trial
        return c.ready and not c.refuses and c.name not in tried and c.circuit.open_until <= NOW and not trial

    answer = choose(candidates, now=NOW, tried=tried, avoid=avoid)
    names = {c.name for c in candidates if usable(c)}
    if isinstance(answer, Choice):
        assert answer.name in names
        paired = {c.name for c in candidates if usable(c) and not c.unpaired} or names
        assert answer.name in paired
        assert answer.name not in avoid or paired <= avoid
    else:
        assert not names
        assert answer.reason
        assert answer.retry_after_seconds > 0


@given(st.lists(st.floats(0, 30), min_size=1, max_size=40))
def test_cool_downs_double_up_to_the_cap_and_failures_within_one_do_not_lengthen_it(pauses):
    circuit, now = CLOSED, 0.0
    for pause in pauses:
        now += pause
        before = circuit
        circuit = circuit.failed(now)
        if before.is_open(now):
            assert circuit == before
        else:
            expected = FIRST_COOL_DOWN_SECONDS * 2**before.num_failures
            assert circuit.open_until - now == pytest.approx(min(expected, MAX_COOL_DOWN_SECONDS))
            assert not circuit.is_open(circuit.open_until)
