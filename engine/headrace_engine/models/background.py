"""A thread for work that may be left undone."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs one after another, off the caller's thread; with `max_waiting` of them waiting, more are dropped.

    The thread starts with the first job and ends with this object, or with the process, whatever is still waiting.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting)
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> bool:
        """Whether there was room. Any thread; never waits. A job that raises is logged."""
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, _end, self._jobs)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True


def _work(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            logger.exception("background work failed")
        del job  # it must not outlive its turn: what it holds may be what ends this thread


def _end(jobs: queue.Queue[Job | None]) -> None:
    """Has the thread leave after the job that it is at."""
    while True:
        try:
            jobs.put_nowait(None)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):  # the thread took one meanwhile
                jobs.get_nowait()
