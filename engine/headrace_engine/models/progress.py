"""How far a rank's loading is: bytes of the checkpoint read so far. Fed by the loading threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Report = Callable[[int, int], None]  # bytes read, bytes to read


class LoadProgress:
    """Calls `report` at the start, at most every `interval_seconds` while loading, and at the end."""

    def __init__(
        self, report: Report, interval_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._interval_seconds, self._clock = report, interval_seconds, clock
        self._lock = threading.Lock()
        self._num_done = self._num_bytes = 0
        self._next_report = 0.0

    def start(self, num_bytes: int) -> None:
        """num_bytes: all that will be read."""
        with self._lock:
            self._num_bytes = num_bytes
            self._tell()

    def add(self, num_bytes: int) -> None:
        """So many more have been read. Any thread."""
        with self._lock:
            self._num_done += num_bytes
            if self._num_done >= self._num_bytes or self._clock() >= self._next_report:
                self._tell()

    def _tell(self) -> None:
        self._next_report = self._clock() + self._interval_seconds
        self._report(self._num_done, self._num_bytes)
