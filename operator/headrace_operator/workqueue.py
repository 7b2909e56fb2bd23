"""A queue of keys: each key is worked on once at a time, retried with backoff, and added again if it changed meanwhile.

The level-triggered heart: events only say *which* resource to look at, never what happened, so any number of them
collapse into one pass. Bounded by the number of keys.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headrace_operator import metrics

logger = logging.getLogger(__name__)

RETRY_BASE_SECONDS = 0.5
RETRY_MAX_SECONDS = 60.0
_JITTER = 0.2


class Key(NamedTuple):
    """A DisaggDeployment."""

    namespace: str
    name: str


class ExpectedError(Exception):
    """A failure that explains itself: logged without a stack trace."""


class WorkQueue:
    """Call `add` from the event loop only; run `work` in as many tasks as passes may run at once."""

    def __init__(self) -> None:
        self._waiting: dict[Key, float] = {}  # since when (monotonic seconds), in order
        self._next: asyncio.Queue[Key] = asyncio.Queue()  # the same keys, each once
        self._active: set[Key] = set()
        self._again: set[Key] = set()  # added while active
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        metrics.QUEUE_OLDEST.set_function(self.oldest_seconds)

    def add(self, key: Key) -> None:
        """Have the key looked at soon."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if key in self._active:
            self._again.add(key)
            return
        if key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._next.put_nowait(key)
            metrics.QUEUE_DEPTH.set(len(self._waiting))

    def oldest_seconds(self) -> float:
        """How long the key that has waited longest has waited by now; 0 if none waits."""
        oldest = next(iter(self._waiting.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key looked at in `seconds`, unless something else comes first; an earlier timer stays."""
        if key in self._waiting:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer and timer.when() <= loop.time() + seconds:
            return
        if timer:
            timer.cancel()
        self._timers[key] = loop.call_later(max(seconds, 0.0), self._fire, key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def work(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        rest_seconds: Callable[[Key], float | None] = lambda key: None,
    ) -> None:
        """Take keys for ever. `reconcile` returns seconds to look again, or None; if it raises, it is tried again.
        `rest_seconds`: how long a key is still left alone, whatever happens."""
        while True:
            key = await self._take(rest_seconds)
            retry: float | None = None
            try:
                retry = await reconcile(key)
                self._failures.pop(key, None)
            except Exception as error:
                retry = self._backoff(key)
                metrics.RECONCILE_ERRORS.labels(error_type=type(error).__name__).inc()
                logger.warning(
                    "%s/%s: %s; again in %.1f s", *key, error, retry, exc_info=not isinstance(error, ExpectedError)
                )
            finally:
                self._active.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            elif retry is not None:
                self.add_after(key, retry)

    async def _take(self, rest_seconds: Callable[[Key], float | None]) -> Key:
        while True:
            key = await self._next.get()
            since = self._waiting.pop(key)
            metrics.QUEUE_DEPTH.set(len(self._waiting))
            rest = rest_seconds(key)
            if rest is None:
                metrics.QUEUE_SECONDS.observe(time.monotonic() - since)
                self._active.add(key)
                return key
            self.add_after(key, rest)

    def _backoff(self, key: Key) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        seconds = min(RETRY_MAX_SECONDS, RETRY_BASE_SECONDS * 2.0 ** min(failures, 10))
        return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
