"""How often a deployment is looked at: now and then while much happens to it, and in proportion to what a look costs.

Every event of every pod asks for a pass: five for each new pod. One pass after the other would keep the whole process
busy, write a status after each, and slow down the very writes that cause the events. So after a pass its deployment
rests `MIN_REST_SECONDS`, or `REST_FACTOR` times as long as the thinking took (some twenty milliseconds for a thousand
pods), at most `MAX_REST_SECONDS`; events that come meanwhile share the next pass. Who has rested is looked at at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace_operator.workqueue import Key

MIN_REST_SECONDS = 0.2
REST_FACTOR = 8.0
MAX_REST_SECONDS = 1.0


class Pace:
    """`now` is in seconds of any one clock; `stopwatch` measures the thinking."""

    def __init__(self, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self._stopwatch = stopwatch
        self._thought: dict[Key, tuple[float, float]] = {}  # when the last pass began, and how long it thought

    @contextmanager
    def thinking(self, key: Key, now: float) -> Iterator[None]:
        """Around the part of a pass, begun at `now`, that lets nothing else run; parts add up."""
        started = self._stopwatch()
        yield
        began, thought = self._thought.get(key, (now, 0.0))
        self._thought[key] = (now, (thought if began == now else 0.0) + self._stopwatch() - started)

    def rest_seconds(self, key: Key, now: float) -> float | None:
        """How long the deployment still rests; None if it may be looked at."""
        if key not in self._thought:
            return None
        began, thought = self._thought[key]
        left = began + min(max(MIN_REST_SECONDS, REST_FACTOR * thought), MAX_REST_SECONDS) - now
        return left if left > 0 else None

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        self._thought.pop(key, None)
