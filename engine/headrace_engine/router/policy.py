"""Which group takes a request: the fewest live requests, among equals the one that has waited longest. Pure.

A group in lock step is as slow as its fullest rank, so equal request counts are the right first key for decode; the
same key keeps prefill queues short. A group that could not be reached cools down for a short while that doubles with
every failure, and then gets one request on trial: the group with the fewest requests is often the one that has just
died, and would otherwise take every request that comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FIRST_COOL_DOWN_SECONDS = 0.25
MAX_COOL_DOWN_SECONDS = 8.0
DEFAULT_RETRY_AFTER_SECONDS = 1.0
COOLING = "cooling down after a connection failure"
ON_TRIAL = "on trial after a connection failure"


@dataclass(frozen=True)
class Circuit:
    """What connection failures say about one group. `open_until` is on the caller's monotonic clock."""

    num_failures: int = 0
    open_until: float = 0.0

    def failed(self, now: float) -> Circuit:
        """One more connection failure. Failures during a cool-down are echoes of one event and do not lengthen it."""
        if self.is_open(now):
            return self
        num_failures = self.num_failures + 1
        exponent = min(num_failures - 1, 16)  # beyond it the cap holds anyway
        cool_down = min(FIRST_COOL_DOWN_SECONDS * 2**exponent, MAX_COOL_DOWN_SECONDS)
        return Circuit(num_failures, now + cool_down)

    def is_open(self, now: float) -> bool:
        return now < self.open_until


CLOSED = Circuit()


@dataclass(frozen=True)
class Candidate:
    """One group as the policy sees it.

    last_turn: when it was chosen last, counted in choices; the smallest goes first among equals.
    on_trial: the one request that a group gets after a cool-down is under way.
    refuses: the group has told that it cannot take this request's KV (another KV fingerprint).
    responds: False once it has stopped responding; it is asked whether it does again, so no request need find out.
    unpaired: a decode group whose KV fingerprint no ready prefill group has; chosen only when no other is left.
    """

    name: str
    num_live: int = 0
    last_turn: int = 0
    ready: bool = True
    circuit: Circuit = CLOSED
    on_trial: bool = False
    refuses: bool = False
    responds: bool = True
    unpaired: bool = False


@dataclass(frozen=True)
class Choice:
    name: str


@dataclass(frozen=True)
class NoChoice:
    """Why no group can take the request, in words for the client, and when to ask again.

    may_pass: a group is kept from it only by a cool-down or a trial, either of which is soon over.
    """

    reason: str
    retry_after_seconds: float = DEFAULT_RETRY_AFTER_SECONDS
    may_pass: bool = False


def choose(
    candidates: Sequence[Candidate],
    *,
    now: float,
    tried: Collection[str] = (),
    avoid: Collection[str] = (),
) -> Choice | NoChoice:
    """The group that takes the next leg.

    tried: groups that failed this request; never chosen again for it.
    avoid: groups that took part in a failed attempt without being at fault; chosen only when no other is left.
    """
    usable = [c for c in candidates if _obstacle(c, now, tried) is None]
    if not usable:
        return _explain(candidates, now, tried)
    paired = [c for c in usable if not c.unpaired] or usable
    preferred = [c for c in paired if c.name not in avoid] or paired
    return Choice(min(preferred, key=lambda c: (c.num_live, c.last_turn, c.name)).name)


def _obstacle(candidate: Candidate, now: float, tried: Collection[str]) -> str | None:
    """What keeps this group from being chosen; None if nothing does."""
    if not candidate.ready:
        return "not ready"
    if candidate.name in tried:
        return "failed this request"
    if candidate.refuses:
        return "of another KV fingerprint"
    if not candidate.responds:
        return "not responding"
    if candidate.circuit.is_open(now):
        return COOLING
    if candidate.circuit.num_failures and candidate.on_trial:
        return ON_TRIAL
    return None


def _explain(candidates: Sequence[Candidate], now: float, tried: Collection[str]) -> NoChoice:
    if not candidates:
        return NoChoice("there are none")
    counts: dict[str, int] = {}
    for candidate in candidates:
        obstacle = _obstacle(candidate, now, tried)
        if obstacle is not None:
            counts[obstacle] = counts.get(obstacle, 0) + 1
    reason = f"of {len(candidates)}: " + ", ".join(f"{count} {obstacle}" for obstacle, count in counts.items())
    reopening = [c.circuit.open_until - now for c in candidates if c.ready and c.circuit.is_open(now)]
    may_pass = COOLING in counts or ON_TRIAL in counts
    return NoChoice(reason, min(reopening, default=DEFAULT_RETRY_AFTER_SECONDS), may_pass)
