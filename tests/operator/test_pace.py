"""How long a deployment rests after a pass."""

from __future__ import annotations

import pytest

from headrace_operator.pace import MAX_REST_SECONDS, MIN_OBJECTS, REST_FACTOR, Pace
from headrace_operator.workqueue import Key

KEY = Key("default", "large")


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def rested(num_objects: int, *thinking_seconds: float) -> float | None:
    """The rest at 100 s, after a pass that began then and thought for so long, part by part."""
    stopwatch = Stopwatch()
    pace = Pace(stopwatch)
    for seconds in thinking_seconds:
        with pace.thinking(KEY, num_objects, 100.0):
            stopwatch.seconds += seconds
    return pace.rest_seconds(KEY, 100.0)


def test_a_small_deployment_never_rests() -> None:
    assert rested(MIN_OBJECTS - 1, 5.0) is None


def test_a_large_one_rests_in_proportion_and_parts_add_up() -> None:
    assert rested(MIN_OBJECTS, 0.01) == pytest.approx(REST_FACTOR * 0.01)
    assert rested(MIN_OBJECTS, 0.01, 0.02) == pytest.approx(REST_FACTOR * 0.03)


def test_a_rest_has_a_limit() -> None:
    assert rested(MIN_OBJECTS, 60.0) == MAX_REST_SECONDS


def test_a_rest_ends() -> None:
    stopwatch = Stopwatch()
    pace = Pace(stopwatch)
    with pace.thinking(KEY, 1000, 100.0):
        stopwatch.seconds += 0.05
    assert pace.rest_seconds(KEY, 100.1) == pytest.approx(REST_FACTOR * 0.05 - 0.1)
    assert pace.rest_seconds(KEY, 100.0 + REST_FACTOR * 0.05) is None
    assert pace.rest_seconds(Key("default", "other"), 100.1) is None
    pace.forget(KEY)
    assert pace.rest_seconds(KEY, 100.1) is None
