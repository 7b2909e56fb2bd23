"""One group as a router knows it: where it answers, what is under way on it, and whether it can be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace_engine.core import Role
from headrace_engine.router.policy import CLOSED, Candidate, Circuit

REFUSAL_MEMORY_SECONDS = 60.0
MAX_REMEMBERED_REFUSALS = 16


@dataclass(frozen=True)
class Endpoint:
    """Where one group's leader answers. `name` is for people; the URL (`http://host:port`) is the identity."""

    role: Role
    url: str
    name: str
    ready: bool = True


class Group:
    """One group as this router knows it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.num_live = 0  # legs dispatched and not released
        self.circuit: Circuit = CLOSED
        self.on_trial = False
        self.num_answers = 0  # legs that it has begun to answer
        self.last_turn = 0  # the fleet's turn in which it was chosen last
        self.fingerprint = ""  # of its KV cache, as it says itself; empty: it has not said
        self.heard_at = time.monotonic()  # when something of it came last
        self.responds = True  # it has not been silent, asked and unasked, for longer than an engine may be
        self._refused_until: dict[str, float] = {}  # KV fingerprint -> monotonic seconds
        self._waits: set[asyncio.Timeout] = set()  # for what its legs are to bring

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def name(self) -> str:
        return self.endpoint.name

    def heard(self) -> None:
        """Bytes of it have come, whatever they say."""
        self.heard_at = time.monotonic()
        self.responds = True

    def lose(self) -> None:
        """It has stopped responding: every wait for it ends now, and it gets no new leg until it is heard again."""
        self.responds = False
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def ends(self, wait: asyncio.Timeout) -> Iterator[None]:
        """While inside, losing the group makes this deadline now. `wait`: entered, and left after this."""
        self._waits.add(wait)
        try:
            if not self.responds:
                wait.reschedule(asyncio.get_running_loop().time())
            yield
        finally:
            self._waits.discard(wait)

    def refuse(self, fingerprint: str, now: float) -> None:
        """Remember for a while that this group's cache has another layout than `fingerprint`."""
        while len(self._refused_until) >= MAX_REMEMBERED_REFUSALS:
            self._refused_until.pop(next(iter(self._refused_until)))
        self._refused_until[fingerprint] = now + REFUSAL_MEMORY_SECONDS

    def may_pair_with(self, fingerprints: Collection[str]) -> bool:
        """Whether one of these, of which an empty one may be any, is or may be this group's."""
        return not self.fingerprint or "" in fingerprints or self.fingerprint in fingerprints

    def candidate(self, now: float, fingerprint: str | None, unpaired: bool = False) -> Candidate:
        refuses = fingerprint is not None and (
            (self.fingerprint not in ("", fingerprint)) or now < self._refused_until.get(fingerprint, 0.0)
        )
        return Candidate(
            self.url,
            num_live=self.num_live,
            last_turn=self.last_turn,
            ready=self.endpoint.ready,
            circuit=self.circuit,
            on_trial=self.on_trial,
            refuses=refuses,
            responds=self.responds,
            unpaired=unpaired,
        )


class Charge:
    """One leg's place on a group: counted from dispatch until `release`, which may be called any number of times."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._released = False
        self._num_answers_before = group.num_answers
        self._is_trial = group.circuit.num_failures > 0
        group.num_live += 1
        if self._is_trial:
            group.on_trial = True

    def reached(self) -> None:
        """The group has begun to answer: past connection failures count no more."""
        self.group.heard()
        self.group.circuit = CLOSED
        self.group.num_answers += 1
        self._num_answers_before = self.group.num_answers
        self._end_trial()

    def unreachable(self, now: float) -> None:
        """The connection failed, broke, or stayed silent beyond its deadline.

        If the group has answered another leg since this one last heard of it, it is there, and the fault is this
        connection's (in a burst of new connections some are late); it gets no cool-down for that.
        """
        if self.group.num_answers == self._num_answers_before:
            self.group.circuit = self.group.circuit.failed(now)
        self._end_trial()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.group.num_live -= 1
            self._end_trial()

    def _end_trial(self) -> None:
        if self._is_trial:
            self._is_trial = False
            self.group.on_trial = False

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
