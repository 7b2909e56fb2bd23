"""How long a deployment rests after a pass."""

from __future__ import annotations

import pytest

from headrace_operator.pace import MAX_REST_SECONDS, MIN_REST_SECONDS, REST_FACTOR, Pace
from headrace_operator.workqueue import Key

KEY = Key("default", "large")


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def rested(*thinking_seconds: float) -> float | None:
    """The rest at 100 s, after a pass that began then and thought for so long, part by part."""
    stopwatch = Stopwatch()
    pace = Pace(stopwatch)
    for seconds in thinking_seconds:
        with pace.thinking(KEY, 100.0):
            stopwatch.seconds += seconds
    return pace.rest_seconds(KEY, 100.0)


def test_who_was_never_looked_at_is_looked_at_at_once() -> None:
    assert rested() is None


def test_events_of_a_fifth_of_a_second_share_a_pass() -> None:
    assert rested(0.001) == pytest.approx(MIN_REST_SECONDS)


def test_who_takes_longer_to_look_at_rests_in_proportion_and_parts_add_up() -> None:
    assert rested(0.03) == pytest.approx(REST_FACTOR * 0.03)
    assert rested(0.02, 0.04) == pytest.approx(REST_FACTOR * 0.06)


def test_a_rest_has_a_limit() -> None:
    assert rested(60.0) == pytest.approx(MAX_REST_SECONDS)


def test_a_rest_ends_and_the_next_pass_counts_anew() -> None:
    stopwatch = Stopwatch()
    pace = Pace(stopwatch)
    with pace.thinking(KEY, 100.0):
        stopwatch.seconds += 0.05
    assert pace.rest_seconds(KEY, 100.1) == pytest.approx(REST_FACTOR * 0.05 - 0.1)
    assert pace.rest_seconds(KEY, 100.0 + REST_FACTOR * 0.05) is None
    assert pace.rest_seconds(Key("default", "other"), 100.1) is None
    with pace.thinking(KEY, 101.0):
        stopwatch.seconds += 0.001
    assert pace.rest_seconds(KEY, 101.0) == pytest.approx(MIN_REST_SECONDS)
    pace.forget(KEY)
    assert pace.rest_seconds(KEY, 101.0) is None
