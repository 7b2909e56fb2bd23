"""How the engines of deployments that scale themselves are: asked now and then, beside the passes, never within one.

A pass says which leaders to ask and reads what they said last; after every round of a deployment it gets a new pass.
What an engine does not answer is not there, and what is old has its time on it: `autoscale.py` decides nothing then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace_operator import metrics
from headrace_operator.groups import GroupKey
from headrace_operator.signals import Sample
from headrace_operator.workqueue import Key

TICK_SECONDS = 0.5


class Asks(Protocol):
    """What engines.Engines does for the board."""

    async def samples(
        self, addresses: Mapping[GroupKey, str], clock: Callable[[], float]
    ) -> dict[GroupKey, Sample]: ...


@dataclass
class _Entry:
    addresses: Mapping[GroupKey, str]
    interval_seconds: float
    due: float  # epoch seconds
    samples: dict[GroupKey, Sample] | None = None
    is_asking: bool = field(default=False)


class SignalBoard:
    """One for the process. `wake`: has a deployment looked at; `clock`: epoch seconds."""

    def __init__(self, engines: Asks, wake: Callable[[Key], None], clock: Callable[[], float] = time.time) -> None:
        self._engines = engines
        self._wake = wake
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}

    def follow(self, key: Key, addresses: Mapping[GroupKey, str], interval_seconds: float) -> None:
        """Ask these (host:port) from now on; the first time at once."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(addresses, interval_seconds, due=self._clock())
            return
        entry.addresses, entry.interval_seconds = addresses, interval_seconds
        entry.due = min(entry.due, self._clock() + interval_seconds)

    def forget(self, key: Key) -> None:
        self._entries.pop(key, None)

    def samples(self, key: Key) -> Mapping[GroupKey, Sample] | None:
        """What was said last, by group; None: nobody has been asked yet."""
        entry = self._entries.get(key)
        return entry.samples if entry else None

    async def run(self) -> None:
        """Ask, for ever. A deployment whose engines are slow to answer holds up no other."""
        async with asyncio.TaskGroup() as rounds:
            while True:
                for key in self.due():
                    rounds.create_task(self.ask(key))
                await asyncio.sleep(TICK_SECONDS)

    def due(self) -> list[Key]:
        """Deployments that are to be asked now."""
        now = self._clock()
        return [key for key, entry in self._entries.items() if entry.due <= now and not entry.is_asking]

    async def ask(self, key: Key) -> None:
        """One round of a deployment."""
        entry = self._entries[key]
        asked, entry.is_asking = entry.addresses, True
        try:
            said = await self._engines.samples(asked, self._clock)
        finally:
            entry.is_asking = False
        entry.due = self._clock() + entry.interval_seconds
        kept = {} if entry.samples is None else {k: s for k, s in entry.samples.items() if k in entry.addresses}
        entry.samples = {**kept, **said}
        metrics.ENGINE_LOOKS.labels(result="ok").inc(len(said))
        metrics.ENGINE_LOOKS.labels(result="failed").inc(len(asked) - len(said))
        if self._entries.get(key) is entry:
            self._wake(key)
