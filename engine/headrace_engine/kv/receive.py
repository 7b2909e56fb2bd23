"""Decode's side of its tickets: which one a notification completes, and when no write can come any more. Pure.

Every expected ticket gets exactly one outcome, `Received` or `ReceiveFailed`; after either no write for it can come.
Stale or foreign notifications change nothing and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_engine.kv.ticket import Completion, Done

STALL_SECONDS = 1.0


@dataclass(frozen=True)
class Received:
    """The request's KV is complete in the blocks and the slot that its ticket named."""

    generation: int
    request_id: str
    num_cached_tokens: int  # prompt tokens that prefill found in its prefix cache


@dataclass(frozen=True)
class ReceiveFailed:
    """The KV will not come. No write for this ticket can come any more, so its blocks may have a new owner."""

    generation: int
    request_id: str
    error: str


ReceiveOutcome = Received | ReceiveFailed


@dataclass
class _Expected:
    request_id: str
    issued_at: float
    deadline: float
    is_abandoned: bool = False


class Receiver:
    """Tickets whose outcome is open.

    Deadlines count only time in which this process runs: bytes that a peer has sent may need our progress to land, so
    after a stall (a frozen node, a stopped process) deadlines move by its length.
    """

    def __init__(self, now: float) -> None:
        self._expected: dict[int, _Expected] = {}
        self._last_tick = now
        self.num_stale = 0

    @property
    def num_wanted(self) -> int:
        """Outcomes that a live request waits for."""
        return sum(1 for expected in self._expected.values() if not expected.is_abandoned)

    @property
    def num_open(self) -> int:
        return len(self._expected)

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open ticket was issued; 0 without one."""
        return max((now - expected.issued_at for expected in self._expected.values()), default=0.0)

    def expect(self, generation: int, request_id: str, now: float, deadline: float) -> None:
        """A ticket is handed out. At the deadline no write for it can be under way any more."""
        if generation in self._expected:
            raise ValueError(f"generation {generation} is expected already")
        self._expected[generation] = _Expected(request_id, issued_at=now, deadline=deadline)

    def abandon(self, generation: int) -> None:
        """The request has ended; its outcome still comes, but nobody is in a hurry for it."""
        if generation in self._expected:
            self._expected[generation].is_abandoned = True

    def complete(self, completion: Completion | None) -> ReceiveOutcome | None:
        """A notification has come (None: not one of ours). Its outcome, or None if it is stale."""
        expected = self._expected.get(completion.generation) if completion is not None else None
        if completion is None or expected is None or expected.request_id != completion.request_id:
            self.num_stale += 1
            return None
        del self._expected[completion.generation]
        if isinstance(completion, Done):
            return Received(completion.generation, completion.request_id, completion.num_cached_tokens)
        return ReceiveFailed(completion.generation, completion.request_id, completion.error)

    def expire(self, now: float) -> list[ReceiveFailed]:
        """Outcomes of tickets whose deadline is past, in whatever order they came. Call after each look for mail."""
        stall = now - self._last_tick
        self._last_tick = now
        if stall > STALL_SECONDS:
            for expected in self._expected.values():
                expected.deadline += stall
        due = [generation for generation, expected in self._expected.items() if expected.deadline <= now]
        return [
            ReceiveFailed(generation, self._expected.pop(generation).request_id, "prefill has not answered in time")
            for generation in due
        ]
