"""How often a large deployment is looked at: in proportion to what a look costs.

Every event of every pod asks for a pass, and a pass over a thousand pods takes some thirty milliseconds of thinking.
One pass after the other would keep the whole process busy, and slow down the very writes that cause the events. So
after a pass over many objects its deployment rests `REST_FACTOR` times as long as the thinking took, at most
`MAX_REST_SECONDS`; events that come meanwhile share the next pass. Small deployments never rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace_operator.workqueue import Key

MIN_OBJECTS = 100
REST_FACTOR = 8.0
MAX_REST_SECONDS = 1.0


class Pace:
    """`now` is in seconds of any one clock; `stopwatch` measures the thinking."""

    def __init__(self, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self._stopwatch = stopwatch
        self._rests: dict[Key, float] = {}  # until when

    @contextmanager
    def thinking(self, key: Key, num_objects: int, now: float) -> Iterator[None]:
        """Around the part of a pass, begun at `now`, that lets nothing else run; parts add up."""
        started = self._stopwatch()
        yield
        if num_objects >= MIN_OBJECTS:
            rest = REST_FACTOR * (self._stopwatch() - started)
            self._rests[key] = min(max(self._rests.get(key, now), now) + rest, now + MAX_REST_SECONDS)

    def rest_seconds(self, key: Key, now: float) -> float | None:
        """How long the deployment still rests; None if it may be looked at."""
        left = self._rests.get(key, now) - now
        return left if left > 0 else None

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        self._rests.pop(key, None)
