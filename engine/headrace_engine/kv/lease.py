"""Leases: who may write into decode's cache, and until when. Pure.

A ticket names blocks of another process's memory, and nothing can stop a write once it is started: not forgetting the
request, not deregistering the memory. So decode must know a time after which no byte comes, and prefill must know until
when it may start a write, while messages between them are lost, late or overtake each other, and their clocks have
nothing in common but their speed. The rules:

1. Prefill asks (`Renew`, at time S of its clock) when it takes a ticket and every sixth of a lease while it works
   on it.
2. Decode binds a ticket to the first rank that asks and refuses every other. It grants at time X only what a request
   still waits for and what has not failed, and holds its own lease until E = X + L (L: the ticket's `lease_seconds`).
3. Prefill learns of the grant (`Renewed`, which carries S back) and may start writes while its clock is before
   P = S + L. Without a grant it may start none: there is no lease by mere receipt of a ticket.
4. A write that has not ended within W (`write_timeout_seconds`) is given up with its connection.
5. After E decode fails the request, refuses to renew, and keeps the blocks for `landing_seconds`: W and some slack.

Decode received what prefill had sent, so S <= X in real time, and P = S + L <= X + L = E: whatever the delay of either
message, every write starts before E and has ended by E + W. A lost Renew or Renewed, a late or a doubled one only makes
P smaller than it could be. Only the rank that holds the lease can end a ticket, so the word of another (a replayed
ticket) frees nothing under its writes; and a ticket that nobody took ends at once when its request does.

What this assumes: the two clocks drift apart by less than the slack over one lease, and no process stands still for
longer than the slack between its look at the clock and the start of a write, or inside a write's copy over shared
memory. A longer stop anywhere else moves no more bytes: before each look at the transport, which is what moves them,
prefill ends the connections of writes that are too old.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace_engine.kv.notices import MAX_GENERATIONS

BEATS_PER_LEASE = 6  # several may be lost or late before a lease ends
LANDING_SLACK_SECONDS = 5.0


@dataclass
class _Beat:
    """One peer's leases. All of a decode engine's tickets have one lease, so one beat serves them."""

    seconds: float
    next_at: float
    generations: dict[int, None] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)  # not asked for yet


class Heartbeats:
    """Which leases prefill asks its peers for, and when: a new one at once, each peer's together every beat."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}
        self._next_at = math.inf  # no beat is due before; with nothing to renew, none ever is

    def add(self, peer_name: str, generation: int, lease_seconds: float, now: float) -> None:
        """A ticket of this peer is being worked on."""
        seconds = lease_seconds / BEATS_PER_LEASE
        beat = self._beats.setdefault(peer_name, _Beat(seconds, now + seconds))
        beat.seconds = min(beat.seconds, seconds)
        beat.next_at = min(beat.next_at, now + seconds)
        beat.generations[generation] = None
        beat.fresh.append(generation)
        self._next_at = now

    def remove(self, peer_name: str, generation: int) -> None:
        """The push of this ticket is over. Without effect if it was never added."""
        beat = self._beats.get(peer_name)
        if beat is None:
            return
        beat.generations.pop(generation, None)
        if not beat.generations:
            del self._beats[peer_name]
            if not self._beats:
                self._next_at = math.inf

    def due(self, now: float) -> list[tuple[str, tuple[int, ...]]]:
        """What to ask now: (peer, its generations), in messages of bounded size. It counts as asked."""
        if now < self._next_at:
            return []
        asked: list[tuple[str, tuple[int, ...]]] = []
        for peer_name, beat in self._beats.items():
            if now >= beat.next_at:
                generations = list(beat.generations)
                beat.next_at = now + beat.seconds
            else:
                generations = [generation for generation in beat.fresh if generation in beat.generations]
            beat.fresh.clear()
            asked += [(peer_name, part) for part in _parts(generations)]
        self._next_at = min((beat.next_at for beat in self._beats.values()), default=math.inf)
        return asked


def _parts(generations: list[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(generations), MAX_GENERATIONS):
        yield tuple(generations[start : start + MAX_GENERATIONS])
