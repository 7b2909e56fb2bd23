"""Who of several operators works: taking, keeping, losing and giving back the Lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client

from headrace_operator import lease as lease_module
from headrace_operator.cluster import Cluster, ClusterError
from headrace_operator.election import DURATION_SECONDS, RENEW_DEADLINE_SECONDS, Election, held, released
from headrace_operator.lease import Lease, LeaseLost


def lease_of(identity: str, renewals: int = 0) -> dict[str, Any]:
    return held(None, "system", "headrace", identity, float(renewals))


# --- decisions ---


@pytest.mark.parametrize(
    ("stored", "after_seconds", "may"),
    [
        (None, 0.0, True),
        (released(lease_of("other")), 0.0, True),
        (lease_of("me"), 0.0, True),
        (lease_of("other"), 0.0, False),
        (lease_of("other"), DURATION_SECONDS - 0.1, False),
        (lease_of("other"), float(DURATION_SECONDS), True),
    ],
    ids=["none", "given back", "ours", "just seen", "not run out", "run out"],
)
def test_a_lease_may_be_taken_when_it_is_free_ours_or_run_out(stored: Any, after_seconds: float, may: bool) -> None:
    election = Election("me")
    election.observe(stored, 100.0)
    election.observe(stored, 100.0 + after_seconds)
    assert election.may_take(stored, 100.0 + after_seconds) is may


def test_a_renewal_starts_the_time_anew_whatever_clock_the_holder_has() -> None:
    election = Election("me")
    election.observe(lease_of("other", 1), 100.0)
    election.observe(lease_of("other", 2), 110.0)
    assert not election.may_take(lease_of("other", 2), 120.0)
    assert election.may_take(lease_of("other", 2), 125.0)


def test_who_could_not_look_does_not_count_the_time() -> None:
    """After an outage of the API server the holder gets its turn to renew first."""
    election = Election("me")
    election.observe(lease_of("other"), 100.0)
    election.lose_sight()
    election.observe(lease_of("other"), 400.0)
    assert not election.may_take(lease_of("other"), 400.0)


def test_taking_over_counts_a_transition_and_renewing_does_not() -> None:
    taken = held(lease_of("other"), "system", "headrace", "me", 5.0)
    assert taken["spec"]["leaseTransitions"] == 1
    assert taken["spec"]["acquireTime"] == "1970-01-01T00:00:05.000000Z"
    renewed = held(taken, "system", "headrace", "me", 7.0)
    assert renewed["spec"]["leaseTransitions"] == 1
    assert renewed["spec"]["acquireTime"] == taken["spec"]["acquireTime"]
    assert renewed["spec"]["renewTime"] > taken["spec"]["renewTime"]


def test_writes_start_until_the_deadline_and_end_with_the_lease() -> None:
    election = Election("me")
    assert election.seconds_left(0.0) == 0.0
    election.renewed(100.0)
    assert election.seconds_left(101.0) == DURATION_SECONDS - 1
    assert election.seconds_left(100.0 + RENEW_DEADLINE_SECONDS) == 0.0


@settings(max_examples=60, deadline=None)
@given(
    looks=st.lists(st.tuples(st.floats(0.1, 6.0), st.sampled_from("ab"), st.booleans()), max_size=60),
    skew=st.floats(-1000, 1000),
)
def test_no_two_ever_write_at_once(looks: list[tuple[float, str, bool]], skew: float) -> None:
    """Two candidates with clocks of their own look at random times, and sometimes cannot reach the API server."""
    elections = {"a": Election("a"), "b": Election("b")}
    stored: dict[str, Any] | None = None
    ends = {"a": 0.0, "b": 0.0}  # when the last write that each may have begun is over
    now = 0.0
    for wait, name, reaches in looks:
        now += wait
        election, clock = elections[name], now + (skew if name == "b" else 0.0)
        if not reaches:
            election.lose_sight()
        else:
            election.observe(stored, clock)
            if election.may_take(stored, clock):
                stored = held(stored, "system", "headrace", name, now)
                election.renewed(clock)
        left = {"a": elections["a"].seconds_left(now), "b": elections["b"].seconds_left(now + skew)}
        for writer, other in (("a", "b"), ("b", "a")):
            if left[writer] > 0:
                assert now >= ends[other] - 1e-6
                ends[writer] = now + left[writer]


# --- the process ---


async def test_nothing_is_written_while_the_lease_is_not_renewed() -> None:
    async with client.ApiClient() as api:
        cluster = Cluster(api)
        cluster.seconds_to_write = lambda: 0.0
        with pytest.raises(ClusterError, match="the lease is not renewed"):
            await cluster.delete("Pod", "default", "demo", "uid")


class Server:
    """A Lease in an API server that can be away."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.is_away = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.is_away:
            raise ClusterError("get Lease: connection refused")
        return self.stored

    async def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        self.stored = body
        return body

    create = replace


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RETRY_SECONDS", 0.002)


def candidate(server: Server, identity: str) -> Lease:
    return Lease(server, "system", "headrace", identity)  # type: ignore[arg-type]


async def test_the_first_works_the_second_stands_by_until_it_ends_in_order() -> None:
    server, stop = Server(), asyncio.Event()
    first, second = candidate(server, "first"), candidate(server, "second")
    assert await first.acquire(stop)
    assert first.seconds_left() > 0
    waiting = asyncio.create_task(second.acquire(stop))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert second.seconds_left() == 0
    await first.release()
    assert await asyncio.wait_for(waiting, 5)


async def test_one_that_stands_by_can_be_stopped() -> None:
    server, stop = Server(), asyncio.Event()
    server.stored = lease_of("other")
    waiting = asyncio.create_task(candidate(server, "me").acquire(stop))
    await asyncio.sleep(0.01)
    stop.set()
    assert not await asyncio.wait_for(waiting, 5)


async def test_losing_the_lease_ends_the_process() -> None:
    server = Server()
    subject = candidate(server, "me")
    await subject.acquire(asyncio.Event())
    server.stored = lease_of("other")
    with pytest.raises(LeaseLost, match="taken by other"):
        await asyncio.wait_for(subject.keep(), 5)
    await subject.release()
    assert server.stored["spec"]["holderIdentity"] == "other"


async def test_an_api_server_that_is_away_ends_nothing() -> None:
    server = Server()
    subject = candidate(server, "me")
    await subject.acquire(asyncio.Event())
    server.is_away = True
    keeping = asyncio.create_task(subject.keep())
    await asyncio.sleep(0.03)
    assert not keeping.done()
    server.is_away = False
    before = (server.stored or {})["spec"]["renewTime"]
    await asyncio.sleep(0.03)
    assert (server.stored or {})["spec"]["renewTime"] > before
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_only_one_that_sees_the_lease_stands_by() -> None:
    """Without the right to read it nobody would ever take over, so that must not pass for ready."""
    server, stop = Server(), asyncio.Event()
    server.stored = lease_of("other")
    subject = candidate(server, "me")
    waiting = asyncio.create_task(subject.acquire(stop))
    await asyncio.sleep(0.02)
    assert subject.is_standing_by
    server.is_away = True
    await asyncio.sleep(0.02)
    assert not subject.is_standing_by
    stop.set()
    await asyncio.wait_for(waiting, 5)
