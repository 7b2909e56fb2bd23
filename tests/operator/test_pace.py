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


class World:
    """A pace, and passes that think for as long as they are told to."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self.pace = Pace(self._stopwatch)

    def think(self, seconds: float, now: float = 100.0, key: Key = KEY) -> World:
        """Part of a pass begun at `now`."""
        with self.pace.thinking(key, now):
            self._stopwatch.seconds += seconds
        return self

    def rest(self, now: float = 100.0, key: Key = KEY) -> float | None:
        return self.pace.rest_seconds(key, now)


def test_who_was_never_looked_at_is_looked_at_at_once() -> None:
    assert World().rest() is None


def test_events_of_a_fifth_of_a_second_share_a_pass() -> None:
    assert World().think(0.001).rest() == pytest.approx(MIN_REST_SECONDS)


def test_who_takes_longer_to_look_at_rests_in_proportion_and_parts_add_up() -> None:
    assert World().think(0.03).rest() == pytest.approx(REST_FACTOR * 0.03)
    assert World().think(0.02).think(0.04).rest() == pytest.approx(REST_FACTOR * 0.06)


def test_looking_at_many_is_as_much_as_looking_at_a_large_one() -> None:
    world = World()
    for number in range(10):
        world.think(0.005, key=Key("default", f"small-{number}"))
    assert world.rest(key=Key("default", "small-9")) == pytest.approx(REST_FACTOR * 0.05)
    assert world.rest(key=Key("default", "never looked at")) is None


def test_a_rest_has_a_limit() -> None:
    assert World().think(60.0).rest() == pytest.approx(MAX_REST_SECONDS)


def test_a_rest_ends_and_what_was_thought_long_ago_counts_no_more() -> None:
    world = World().think(0.05)
    assert world.rest(100.1) == pytest.approx(REST_FACTOR * 0.05 - 0.1)
    assert world.rest(100.0 + REST_FACTOR * 0.05) is None
    world.think(0.001, 100.0 + MAX_REST_SECONDS)
    assert world.rest(100.0 + MAX_REST_SECONDS) == pytest.approx(MIN_REST_SECONDS)


def test_of_one_that_is_gone_nothing_is_kept() -> None:
    world = World().think(60.0)
    world.pace.forget(KEY)
    assert world.rest() is None
