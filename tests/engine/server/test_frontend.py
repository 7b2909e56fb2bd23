"""Placement on ranks, and what the frontend makes of ranks that come, report and vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
from tests.pd.engines import free_ports

from headrace_engine.config import EngineConfig
from headrace_engine.control import identity_of
from headrace_engine.core import FinishReason, Leg, SamplingParams
from headrace_engine.messages import Abort, Add, Batch, FromRank, Hello, RankState, Tokens, ToRank, Wake, Welcome
from headrace_engine.server.errors import ApiError
from headrace_engine.server.frontend import Frontend
from headrace_engine.server.handle import RequestHandle


class FakeRank:
    """A rank's end of the control connection."""

    def __init__(self, port: int, rank: int) -> None:
        self.rank = rank
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity_of(rank))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: FromRank) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def hello(self, incarnation: str = "i", fingerprint: str = "f") -> None:
        self.send(Hello(self.rank, incarnation, fingerprint, 64, 10))

    async def receive(self, kind: type) -> ToRank:
        """The next message of this kind."""
        async with asyncio.timeout(5):
            while True:
                try:
                    message = msgspec.msgpack.decode(self.socket.recv(zmq.NOBLOCK), type=ToRank)
                except zmq.Again:
                    await asyncio.sleep(0.005)
                    continue
                if isinstance(message, kind):
                    return message

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Group:
    def __init__(self, num_ranks: int, is_sharded: bool) -> None:
        (self.port,) = free_ports(1)
        self.failures: list[str] = []
        self._has_failed = asyncio.Event()
        config = EngineConfig(
            model="x", data=num_ranks, data_local=num_ranks, expert_parallel=is_sharded, control_port=self.port
        )
        self.frontend = Frontend(config, self._on_failure)
        self.frontend.start()
        self.ranks = [FakeRank(self.port, rank) for rank in range(num_ranks)]

    async def ready(self) -> None:
        for rank in self.ranks:
            rank.hello()
            await rank.receive(Welcome)

    def submit(self) -> RequestHandle:
        return self.frontend.submit("r", Leg.WHOLE, [1], SamplingParams())

    async def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        await self.frontend.close()

    async def failed(self) -> str:
        async with asyncio.timeout(10):
            await self._has_failed.wait()
        return self.failures[0]

    def _on_failure(self, reason: str) -> None:
        self.failures.append(reason)
        self._has_failed.set()


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group(3, is_sharded=True)
    yield group
    await group.close()


async def test_requests_are_refused_until_every_rank_is_there(group: Group) -> None:
    group.ranks[0].hello()
    await group.ranks[0].receive(Welcome)
    with pytest.raises(ApiError) as caught:
        group.submit()
    assert (caught.value.error.status, caught.value.error.retriable) == (503, True)


async def test_equal_work_is_spread_evenly_and_released_when_it_ends(group: Group) -> None:
    await group.ready()
    handles = [group.submit() for _ in range(7)]
    assert sorted(view.num_live for view in group.frontend.ranks) == [2, 2, 3]
    for handle in handles[:3]:
        handle.close()
        handle.close()
    assert sorted(view.num_live for view in group.frontend.ranks) == [1, 1, 2]
    for handle in handles[3:]:
        handle.close()
    assert [view.num_live for view in group.frontend.ranks] == [0, 0, 0]


async def test_work_for_one_rank_wakes_the_others(group: Group) -> None:
    await group.ready()
    handle = group.submit()
    for rank in group.ranks:
        await rank.receive(Add if rank.rank == handle.rank else Wake)


async def test_a_request_that_its_rank_has_ended_is_not_aborted(group: Group) -> None:
    await group.ready()
    handle = group.submit()
    rank = group.ranks[handle.rank]
    rank.send(Batch([Tokens(handle.request_id, [5], FinishReason.STOP)]))
    assert await handle.next() == [Tokens(handle.request_id, [5], FinishReason.STOP)]
    assert group.frontend.num_in_flight == 0
    handle.close()
    other = group.submit()
    other.close()
    aborted = await group.ranks[other.rank].receive(Abort)
    assert aborted == Abort(other.request_id)


async def test_what_a_drain_does_not_finish_is_aborted_and_its_clients_told(group: Group) -> None:
    await group.ready()
    handles = [group.submit() for _ in range(3)]
    group.frontend.end_requests("too late")
    for handle in handles:
        assert await group.ranks[handle.rank].receive(Abort) == Abort(handle.request_id)
        (item,) = await handle.next()
        assert (item.error.status, item.error.message) == (503, "too late")
        handle.close()
    assert group.frontend.idle.is_set()
    assert [view.num_live for view in group.frontend.ranks] == [0, 0, 0]


async def test_a_rank_that_vanishes_fails_the_group_and_every_request(group: Group) -> None:
    await group.ready()
    handle = group.submit()
    group.ranks[(handle.rank + 1) % 3].close()
    assert "is gone" in await group.failed()
    (item,) = await handle.next()
    assert item.error.status == 503
    with pytest.raises(ApiError):
        group.submit()


@pytest.mark.parametrize(
    ("incarnation", "fingerprint", "reason"), [("another", "f", "replaced"), ("i", "another", "fingerprint")]
)
async def test_a_rank_that_does_not_belong_fails_the_group(
    group: Group, incarnation: str, fingerprint: str, reason: str
) -> None:
    await group.ready()
    group.ranks[0].hello(incarnation, fingerprint)
    assert reason in await group.failed()


async def test_a_stranger_on_the_control_port_changes_nothing(group: Group) -> None:
    await group.ready()
    handle = group.submit()
    stranger = FakeRank(group.port, 99)
    stranger.send(Batch([Tokens(handle.request_id, [6], FinishReason.STOP)]))
    stranger.hello()
    stranger.send(RankState(99, *[0] * 15))
    await asyncio.sleep(0.2)
    group.ranks[handle.rank].send(Batch([Tokens(handle.request_id, [5], FinishReason.STOP)]))
    assert await handle.next() == [Tokens(handle.request_id, [5], FinishReason.STOP)]
    assert group.failures == []
    stranger.close()


async def test_only_a_requests_own_rank_speaks_for_it(group: Group) -> None:
    await group.ready()
    handle = group.submit()
    others = [rank for rank in group.ranks if rank.rank != handle.rank]
    others[0].send(Batch([Tokens(handle.request_id, [6], FinishReason.STOP)]))
    await asyncio.sleep(0.1)
    group.ranks[handle.rank].send(Batch([Tokens(handle.request_id, [5], FinishReason.STOP)]))
    assert await handle.next() == [Tokens(handle.request_id, [5], FinishReason.STOP)]


async def test_rubbish_on_the_control_port_is_dropped(group: Group) -> None:
    await group.ready()
    group.ranks[0].socket.send(b"rubbish")
    group.ranks[0].socket.send_multipart([b"a", b"b", b"c"])
    handle = group.submit()
    group.ranks[handle.rank].send(Batch([Tokens(handle.request_id, [5], FinishReason.STOP)]))
    assert await handle.next()
    assert group.failures == []
    handle.close()
