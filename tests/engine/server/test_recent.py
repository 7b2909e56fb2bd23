"""The last half minute: what is in it, what has left it, and that nothing piles up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.server.recent import BOUNDS_SECONDS, WINDOW_SECONDS, RecentRise, RecentTimes


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (0.001, 0),
        (0.0011, 1),
        (0.002, 2),  # two buckets to a doubling
        (BOUNDS_SECONDS[-1], len(BOUNDS_SECONDS) - 1),
        (1e9, len(BOUNDS_SECONDS)),
    ],
)
def test_a_time_is_counted_in_the_bucket_whose_upper_end_it_does_not_exceed(seconds: float, bucket: int) -> None:
    times = RecentTimes()
    times.add(seconds, now=5.0)
    counts = times.counts(now=5.0)
    assert [index for index, count in enumerate(counts) if count] == [bucket]
    assert len(counts) == len(BOUNDS_SECONDS) + 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 20), max_size=40), st.floats(0, 90))
def test_times_are_kept_for_the_window_less_a_slot_and_no_longer_than_it(gaps: list[float], pause: float) -> None:
    times, now, added = RecentTimes(), 0.0, []
    for gap in gaps:
        now += gap
        times.add(1.0, now)
        added.append(now)
    now += pause
    total = sum(times.counts(now))
    assert total >= sum(now - when < WINDOW_SECONDS - 3 for when in added)
    assert total <= sum(now - when <= WINDOW_SECONDS for when in added)
    assert len(times._slots) <= WINDOW_SECONDS / 3


def test_a_counter_rises_from_its_first_reading() -> None:
    rise = RecentRise()
    assert rise.rise(0.0) == 0
    rise.read(1000, 10.0)
    assert rise.rise(10.0) == 0
    rise.read(1005, 12.0)
    assert rise.rise(12.0) == 5


def test_a_counter_that_has_stood_still_for_the_window_has_not_risen() -> None:
    rise = RecentRise()
    rise.read(0, 0.0)
    rise.read(7, 1.0)
    assert rise.rise(WINDOW_SECONDS) == 7
    assert rise.rise(WINDOW_SECONDS + 2) == 0
    rise.read(9, 100.0)
    assert rise.rise(100.0) == 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 3), st.integers(0, 50)), min_size=1, max_size=100))
def test_readings_are_bounded_and_their_rise_is_that_of_the_window(steps: list[tuple[float, int]]) -> None:
    rise, now, value = RecentRise(), 0.0, 0
    history: list[tuple[float, int]] = []
    for gap, more in steps:
        now, value = now + gap, value + more
        rise.read(value, now)
        history.append((now, value))

    def value_at(when: float) -> int:
        return max((v for at, v in history if at <= when), default=history[0][1])

    assert len(rise._readings) <= 2 * WINDOW_SECONDS + 2
    # Readings are a second apart, or as far as they came (3 s here): the window begins with one of them.
    assert value - value_at(now - WINDOW_SECONDS) <= rise.rise(now) <= value - value_at(now - WINDOW_SECONDS - 4)
