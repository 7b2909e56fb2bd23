"""The groups that exist now, by role, with what this router has sent to each and what it has learnt about it.

Whoever knows the endpoints (a static list, EndpointSlices) calls `Fleet.replace`; requests call `Fleet.dispatch` and
hold the `Charge` that comes back. A group that vanishes from the list gets no new request; charges on it live on, and
it is watched (see `liveness`) as long as there are any.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from headrace_engine.core import Role
from headrace_engine.router.group import Charge, Endpoint, Group
from headrace_engine.router.policy import Choice, NoChoice, choose

MIN_WAIT_SECONDS = 0.1  # between two looks for a group


class NoGroup(Exception):
    """No group of `role` can take the request; `why` says so in words."""

    def __init__(self, role: Role, why: NoChoice) -> None:
        super().__init__(f"no {role} group can take the request: {why.reason}")
        self.role = role
        self.may_pass = why.may_pass
        self.retry_after_seconds = why.retry_after_seconds


class Fleet:
    """All groups by role. One per router process, used from its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[Role, dict[str, Group]] = {role: {} for role in Role}
        self._departed: list[Group] = []  # no longer listed, with legs still under way
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
        kept = {id(group) for groups in fresh.values() for group in groups.values()}
        self._departed += [group for group in self.groups() if id(group) not in kept]
        self._groups = fresh
        self.synced = True

    def set_ready(self, role: Role, url: str, ready: bool) -> None:
        group = self._groups[role].get(url)
        if group is not None:
            group.endpoint = replace(group.endpoint, ready=ready)
            if not ready:
                group.fingerprint = ""  # what comes back may be another engine

    def check(self, role: Role, *, tried: Collection[str] = ()) -> None:
        """Raise NoGroup if no group of `role` can be dispatched to now, or soon."""
        try:
            self._choose(role, tried, (), None)
        except NoGroup as error:
            if not error.may_pass:
                raise

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

    async def dispatch_soon(
        self,
        role: Role,
        patience_seconds: float,
        *,
        tried: Collection[str] = (),
        avoid: Collection[str] = (),
        fingerprint: str | None = None,
    ) -> Charge:
        """As `dispatch`, but waits while all that is missing is that a group cools down or ends its trial."""
        give_up_at = self._clock() + patience_seconds
        while True:
            try:
                return self.dispatch(role, tried=tried, avoid=avoid, fingerprint=fingerprint)
            except NoGroup as error:
                left = give_up_at - self._clock()
                if not error.may_pass or left <= 0:
                    raise
                # Not all that wait at the same moment: the first one is the trial for the others.
                wait = max(MIN_WAIT_SECONDS, error.retry_after_seconds) * random.uniform(1.0, 1.5)
            await asyncio.sleep(min(wait, left))

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

    def watched(self) -> list[Group]:
        """Every group that may have legs under way, also those that are no longer listed."""
        self._departed = [group for group in self._departed if group.num_live]
        return [*self.groups(), *self._departed]

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
        "responds": group.responds,
        "fingerprint": group.fingerprint,
        "in_flight": group.num_live,
        "connection_failures": group.circuit.num_failures,
        "cool_down_seconds": round(max(0.0, group.circuit.open_until - now), 3),
    }
