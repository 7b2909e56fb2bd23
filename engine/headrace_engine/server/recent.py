"""What the last half minute was like: times of answers, and how far counters of ranks rose. Pure; `now` is passed in.

Totals since the start, as /metrics has them, say nothing about now unless somebody keeps the ones before. /state has
these instead, so that one look is enough, also for a reader that has just been started. Times are counted in buckets,
because counts of several engines add up and percentiles do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

WINDOW_SECONDS = 30.0
_SLOT_SECONDS = 3.0
_NUM_SLOTS = int(WINDOW_SECONDS / _SLOT_SECONDS)
# Upper ends of the buckets, in seconds: two to a doubling, from a millisecond to six minutes. What is longer is counted
# in one bucket more.
BOUNDS_SECONDS = tuple(round(0.001 * 2 ** (i / 2), 6) for i in range(38))


class RecentTimes:
    """Counts of the seconds that something took, over the last `WINDOW_SECONDS` (up to one slot less)."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, list[int]]] = deque()  # number of the slot, counts by bucket; oldest first

    def add(self, seconds: float, now: float) -> None:
        """Something took `seconds` and has ended `now`. `now` never goes back."""
        number = int(now // _SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != number:
            self._forget(number)
            self._slots.append((number, [0] * (len(BOUNDS_SECONDS) + 1)))
        self._slots[-1][1][bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def counts(self, now: float) -> list[int]:
        """By bucket: how many took at most `BOUNDS_SECONDS[i]` and longer than the bound before; the last: longer."""
        self._forget(int(now // _SLOT_SECONDS))
        totals = [0] * (len(BOUNDS_SECONDS) + 1)
        for _, counts in self._slots:
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
        return totals

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] <= number - _NUM_SLOTS:
            self._slots.popleft()


class RecentRise:
    """How far a counter that never falls has risen over the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()  # (when, value), one a second at most; oldest first

    def read(self, value: float, now: float) -> None:
        """The counter's value `now`; the first one is where it rises from."""
        if len(self._readings) > 1 and now - self._readings[-2][0] < 1.0:
            self._readings.pop()
        self._readings.append((now, value))
        self._forget(now)

    def rise(self, now: float) -> float:
        self._forget(now)
        return self._readings[-1][1] - self._readings[0][1] if self._readings else 0.0

    def _forget(self, now: float) -> None:
        # The last reading from before the window is where the window begins.
        while len(self._readings) > 1 and self._readings[1][0] <= now - WINDOW_SECONDS:
            self._readings.popleft()


class RecentAnswers:
    """Times of the answers of one engine."""

    def __init__(self) -> None:
        self.ticket = RecentTimes()  # decode: from arrival until cache space was reserved
        self.prompt = RecentTimes()  # from there (where there is no ticket: from arrival) to the first token
        self.first_token = RecentTimes()  # from arrival
        self.inter_token = RecentTimes()

    def state(self, now: float) -> dict[str, object]:
        """For /state."""
        return {
            "window_seconds": WINDOW_SECONDS,
            "bounds_seconds": BOUNDS_SECONDS,
            "ticket": self.ticket.counts(now),
            "prompt": self.prompt.counts(now),
            "first_token": self.first_token.counts(now),
            "inter_token": self.inter_token.counts(now),
        }
