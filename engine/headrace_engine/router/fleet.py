"""The groups that exist now, by role, with what this router has sent to each and what it has learnt about it.

Whoever knows the endpoints (a static list, EndpointSlices) calls `Fleet.replace`; requests call `Fleet.dispatch` and
hold the `Charge` that comes back. A group that vanishes from the list gets no new request; charges on it live on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace_engine.core import Role
from headrace_engine.router.policy import CLOSED, Candidate, Choice, Circuit, NoChoice, choose

REFUSAL_MEMORY_SECONDS = 60.0
MAX_REMEMBERED_REFUSALS = 16


@dataclass(frozen=True)
class Endpoint:
    """Where one group's leader answers. `name` is for people; the URL (`http://host:port`) is the identity."""

    role: Role
    url: str
    name: str
    ready: bool = True


class NoGroup(Exception):
    """No group of `role` can take the request; `why` says so in words."""

    def __init__(self, role: Role, why: NoChoice) -> None:
        super().__init__(f"no {role} group can take the request: {why.reason}")
        self.role = role
        self.retry_after_seconds = why.retry_after_seconds


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
        self._refused_until: dict[str, float] = {}  # KV fingerprint -> monotonic seconds

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def name(self) -> str:
        return self.endpoint.name

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


class Fleet:
    """All groups by role. One per router process, used from its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[Role, dict[str, Group]] = {role: {} for role in Role}
        self._turn = 0
        self.synced = False  # the endpoints have been learnt at least once

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """These are the endpoints now. Groups that stay keep their counts and circuit."""
        fresh: dict[Role, dict[str, Group]] = {role: {} for role in Role}
        for endpoint in endpoints:
            group = self._groups[endpoint.role].get(endpoint.url)
            if group is None or group.name != endpoint.name:  # a reused address is another group
                group = Group(endpoint)
            group.endpoint = endpoint
            fresh[endpoint.role][endpoint.url] = group
        self._groups = fresh
        self.synced = True

    def set_ready(self, role: Role, url: str, ready: bool) -> None:
        group = self._groups[role].get(url)
        if group is not None:
            group.endpoint = replace(group.endpoint, ready=ready)
            if not ready:
                group.fingerprint = ""  # what comes back may be another engine

    def check(self, role: Role, *, tried: Collection[str] = ()) -> None:
        """Raise NoGroup if no group of `role` could be dispatched to now."""
        self._choose(role, tried, (), None)

    def dispatch(
        self,
        role: Role,
        *,
        tried: Collection[str] = (),
        avoid: Collection[str] = (),
        fingerprint: str | None = None,
    ) -> Charge:
        """Choose a group of `role` and charge it with one leg. Raises NoGroup."""
        group = self._groups[role][self._choose(role, tried, avoid, fingerprint)]
        self._turn += 1
        group.last_turn = self._turn
        return Charge(group)

    def _choose(self, role: Role, tried: Collection[str], avoid: Collection[str], fingerprint: str | None) -> str:
        now = self._clock()
        partners = self._partners() if role is Role.DECODE else {""}
        candidates = [
            group.candidate(now, fingerprint, unpaired=not group.may_pair_with(partners))
            for group in self._groups[role].values()
        ]
        choice = choose(candidates, now=now, tried=tried, avoid=avoid)
        if not isinstance(choice, Choice):
            raise NoGroup(role, choice)
        return choice.name

    def _partners(self) -> set[str]:
        """KV fingerprints of the ready prefill groups; empty ones may be any."""
        return {group.fingerprint for group in self._groups[Role.PREFILL].values() if group.endpoint.ready}

    def groups(self, role: Role | None = None) -> Iterator[Group]:
        for each in Role if role is None else (role,):
            yield from self._groups[each].values()

    def num_ready(self, role: Role) -> int:
        return sum(group.endpoint.ready for group in self.groups(role))

    @property
    def is_unified(self) -> bool:
        """Requests go whole to one unified group; otherwise as two legs to a decode and a prefill group."""
        return bool(self._groups[Role.UNIFIED])

    def missing(self) -> list[Role]:
        """The roles that lack a ready group; empty when the router can serve."""
        needed = [Role.UNIFIED] if self.is_unified else [Role.DECODE, Role.PREFILL]
        return [role for role in needed if not self.num_ready(role)]

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """For /state: each role's groups with in-flight legs, failures and remaining cool-down in seconds."""
        now = self._clock()
        return {role: [_describe(group, now) for group in groups.values()] for role, groups in self._groups.items()}


def _describe(group: Group, now: float) -> dict[str, Any]:
    return {
        "name": group.name,
        "url": group.url,
        "ready": group.endpoint.ready,
        "fingerprint": group.fingerprint,
        "in_flight": group.num_live,
        "connection_failures": group.circuit.num_failures,
        "cool_down_seconds": round(max(0.0, group.circuit.open_until - now), 3),
    }
