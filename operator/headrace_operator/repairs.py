"""How often a deployment's children may be brought back to what is wanted. Pure.

A hand edit is repaired at once. But if another program keeps changing the same child (a second operator, a policy
agent), repairing as fast as it edits would load the API server for ever and help no one; so repairs are counted.
"""

from __future__ import annotations

from collections import deque

MAX_REPAIRS = 10
WINDOW_SECONDS = 60.0


class RepairBudget:
    """At most `MAX_REPAIRS` repairs in any `WINDOW_SECONDS`, for one spec of one deployment. Times are epoch seconds.

    What a new generation of the spec changes is no repair, so each generation starts with a budget of its own.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._times: deque[float] = deque(maxlen=MAX_REPAIRS)

    def wait_seconds(self, now: float) -> float:
        """0 if repairs may be made now, else how long to leave things as they are."""
        if len(self._times) < MAX_REPAIRS:
            return 0.0
        return max(0.0, self._times[0] + WINDOW_SECONDS - now)

    def spend(self, num_repairs: int, now: float) -> None:
        """Repairs were made."""
        self._times.extend([now] * min(num_repairs, MAX_REPAIRS))
