"""How often a deployment is looked at: now and then while much happens, and in proportion to what all looks cost.

Every event of every pod asks for a pass: five for each new pod. One pass after the other would keep the whole process
busy, write a status after each, and slow down the very writes that cause the events, be it that one deployment has a
thousand pods (some twenty milliseconds of thinking) or that a hundred have ten. So after a pass its deployment rests
`MIN_REST_SECONDS`, or `REST_FACTOR` times as long as all passes of the last `MAX_REST_SECONDS` have thought, which are
also the longest rest; events that come meanwhile share the next pass. Who has rested is looked at at once.
"""

from __future__ import annotations

import time
from collections import deque
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
        self._began: dict[Key, float] = {}  # the last pass
        self._thoughts: deque[tuple[float, float]] = deque()  # of passes begun then, for so long; in order of their end

    @contextmanager
    def thinking(self, key: Key, now: float) -> Iterator[None]:
        """Around the part of a pass, begun at `now`, that lets nothing else run; parts add up."""
        started = self._stopwatch()
        yield
        self._began[key] = now
        self._thoughts.append((now, self._stopwatch() - started))

    def rest_seconds(self, key: Key, now: float) -> float | None:
        """How long the deployment still rests; None if it may be looked at."""
        if key not in self._began:
            return None
        while self._thoughts and self._thoughts[0][0] <= now - MAX_REST_SECONDS:
            self._thoughts.popleft()
        thought = sum(seconds for _, seconds in self._thoughts)
        left = self._began[key] + min(max(MIN_REST_SECONDS, REST_FACTOR * thought), MAX_REST_SECONDS) - now
        return left if left > 0 else None

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        self._began.pop(key, None)
