"""Decode's side of its tickets: who holds each one's lease, what completes it, when no write can come any more. Pure.

    issued ──first Renew──> held ──Done / Failed of the holder──> over
      │                       ├── lease past, or a write given up ──> lost ──bytes have landed──> over
      │                       └── abandoned: not renewed any more ──> lease past, bytes have landed ──> over
      └── abandoned, or nobody takes it within a lease ──> over

Every expected ticket gets exactly one outcome, `Received` or `ReceiveFailed`, after which no write for it can come; a
`ReceiveLost` may come before it. Why that is so: see `lease`. Stale or foreign notices change nothing and are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace_engine.kv.notices import Completion, Done

STALL_SECONDS = 1.0


@dataclass(frozen=True)
class Received:
    """The request's KV is complete in the blocks and the slot that its ticket named."""

    generation: int
    request_id: str
    num_cached_tokens: int  # prompt tokens that prefill found in its prefix cache


@dataclass(frozen=True)
class ReceiveLost:
    """The KV will not come, but bytes may still land: the outcome, and with it the blocks, follows."""

    generation: int
    request_id: str
    error: str


@dataclass(frozen=True)
class ReceiveFailed:
    """The KV will not come. No write for this ticket can come any more, so its blocks may have a new owner."""

    generation: int
    request_id: str
    error: str


ReceiveEvent = Received | ReceiveFailed | ReceiveLost


@dataclass
class _Expected:
    request_id: str
    issued_at: float
    lease_end: float  # without a holder: when the ticket is void
    holder: str | None = None  # agent that may write, the first that asked
    is_wanted: bool = True  # a live request waits for it, and it has not failed
    error: str = "the request has ended"


class Receiver:
    """Tickets whose outcome is open.

    Deadlines count only time in which this process runs: bytes that a peer has sent may need our progress to land, so
    after a stall (a frozen node, a stopped process) they move by its length. That only makes leases longer.
    """

    def __init__(self, now: float, lease_seconds: float, landing_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._landing_seconds = landing_seconds
        self._expected: dict[int, _Expected] = {}  # in order of issue
        self._last_tick = now
        self._next_due = math.inf  # nothing is due before
        self.num_wanted = 0  # outcomes that a live request waits for
        self.num_stale = 0

    @property
    def num_open(self) -> int:
        return len(self._expected)

    @property
    def holders(self) -> set[str]:
        """Agents that hold a lease, and so are owed answers."""
        return {expected.holder for expected in self._expected.values() if expected.holder is not None}

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open ticket was issued; 0 without one."""
        return now - next(iter(self._expected.values())).issued_at if self._expected else 0.0

    def expect(self, generation: int, request_id: str, now: float) -> None:
        """A ticket is handed out. Somebody must take it within a lease."""
        if generation in self._expected:
            raise ValueError(f"generation {generation} is expected already")
        lease_end = now + self._lease_seconds
        self._expected[generation] = _Expected(request_id, now, lease_end)
        self._next_due = min(self._next_due, lease_end)
        self.num_wanted += 1

    def abandon(self, generation: int) -> None:
        """The request has ended. Its ticket is not renewed any more, and its outcome is waited for in no hurry."""
        expected = self._expected.get(generation)
        if expected is None:
            return
        self._give_up(expected)
        if expected.holder is None:
            expected.lease_end = -math.inf  # whoever comes for it now is refused
            self._next_due = -math.inf

    def renew(self, sender: str, generations: Iterable[int], now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A rank asks for these leases. Which it gets, until `now` and a lease; and which it does not.

        now: read after the request has come, never before (see `lease`).
        """
        granted: list[int] = []
        refused: list[int] = []
        for generation in generations:
            expected = self._expected.get(generation)
            if expected is None or not expected.is_wanted or expected.holder not in (None, sender):
                refused.append(generation)
                continue
            expected.holder = sender
            expected.lease_end = max(expected.lease_end, now + self._lease_seconds)
            granted.append(generation)
        return tuple(granted), tuple(refused)

    def complete(self, sender: str, completion: Completion | None, now: float) -> ReceiveEvent | None:
        """A rank says how its push ended (None: not a notice of ours). None if that is stale or not its to say."""
        expected = self._expected.get(completion.generation) if completion is not None else None
        if completion is None or expected is None or expected.request_id != completion.request_id:
            self.num_stale += 1
            return None
        if expected.holder != sender and (expected.holder is not None or isinstance(completion, Done)):
            self.num_stale += 1  # a Failed for a ticket that nobody holds is a rank that could not take it
            return None
        generation, request_id = completion.generation, completion.request_id
        if isinstance(completion, Done):
            self._forget(generation)
            return Received(generation, request_id, completion.num_cached_tokens)
        if completion.is_settled:
            self._forget(generation)
            return ReceiveFailed(generation, request_id, completion.error)
        was_wanted = expected.is_wanted
        self._give_up(expected)
        expected.error, expected.lease_end = completion.error, now
        self._next_due = min(self._next_due, now + self._landing_seconds)
        return ReceiveLost(generation, request_id, completion.error) if was_wanted else None

    def expire(self, now: float) -> list[ReceiveEvent]:
        """Events of tickets that are due, in whatever order they were issued. Call after each look for mail."""
        stall = now - self._last_tick
        self._last_tick = now
        if stall > STALL_SECONDS:
            self._next_due += stall
            for expected in self._expected.values():
                expected.lease_end += stall
        if now < self._next_due:
            return []
        events = [
            event
            for generation, expected in list(self._expected.items())
            if (event := self._look(generation, expected, now)) is not None
        ]
        self._next_due = min(map(self._due_at, self._expected.values()), default=math.inf)
        return events

    def _look(self, generation: int, expected: _Expected, now: float) -> ReceiveEvent | None:
        if now < self._due_at(expected):
            return None
        if expected.holder is None:
            self._forget(generation)
            error = f"no prefill engine has taken the ticket within {self._lease_seconds:g} s"
            return ReceiveFailed(generation, expected.request_id, error)
        if not expected.is_wanted:
            self._forget(generation)
            return ReceiveFailed(generation, expected.request_id, expected.error)
        expected.error = f"prefill has not renewed its lease for {self._lease_seconds:g} s"
        self._give_up(expected)
        return ReceiveLost(generation, expected.request_id, expected.error)

    def _due_at(self, expected: _Expected) -> float:
        can_be_written = expected.holder is not None and not expected.is_wanted
        return expected.lease_end + (self._landing_seconds if can_be_written else 0.0)

    def _give_up(self, expected: _Expected) -> None:
        self.num_wanted -= expected.is_wanted
        expected.is_wanted = False

    def _forget(self, generation: int) -> None:
        self._give_up(self._expected.pop(generation))
