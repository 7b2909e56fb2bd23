"""The board of what engines say: whom it asks when, what it keeps, and that slow or dead engines hold up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.operator.test_signals import SAMPLE, STATE

from headrace_operator.engines import Engines
from headrace_operator.groups import GroupKey
from headrace_operator.signal_board import SignalBoard
from headrace_operator.signals import Sample
from headrace_operator.workqueue import Key

ONE, OTHER = Key("default", "one"), Key("default", "other")
P0, D0 = GroupKey("prefill", "r", 0), GroupKey("decode", "r", 0)


class Asked:
    """Engines that say `says`; those of `silent` addresses do not; asking waits for `gate`."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.asked: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def samples(self, addresses: Mapping[GroupKey, str], clock: Callable[[], float]) -> dict[GroupKey, Sample]:
        self.asked.append(sorted(addresses.values()))
        await self.gate.wait()
        return {key: SAMPLE for key, address in addresses.items() if address not in self.silent}


class Rig:
    """A board, its clock, and whom it has woken."""

    def __init__(self) -> None:
        self.engines, self.now = Asked(), 100.0
        self.woken: list[Key] = []
        self.board = SignalBoard(self.engines, self.woken.append, lambda: self.now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_deployment_is_asked_at_once_and_then_at_its_interval(rig: Rig) -> None:
    rig.board.follow(ONE, {P0: "a", D0: "b"}, 15)
    assert rig.board.samples(ONE) is None, "nobody has been asked yet"
    assert rig.board.due() == [ONE]
    await rig.board.ask(ONE)
    assert rig.engines.asked == [["a", "b"]]
    assert rig.board.samples(ONE) == {P0: SAMPLE, D0: SAMPLE}
    assert rig.woken == [ONE]
    rig.now = 114.9
    assert rig.board.due() == []
    rig.now = 115.0
    assert rig.board.due() == [ONE]


async def test_who_says_nothing_keeps_what_it_said_with_its_old_time(rig: Rig) -> None:
    rig.board.follow(ONE, {P0: "a", D0: "b"}, 15)
    await rig.board.ask(ONE)
    rig.engines.silent = {"b"}
    await rig.board.ask(ONE)
    assert rig.board.samples(ONE) == {P0: SAMPLE, D0: SAMPLE}
    rig.board.follow(ONE, {P0: "a"}, 15)
    await rig.board.ask(ONE)
    assert rig.board.samples(ONE) == {P0: SAMPLE}, "a group that is gone is forgotten"


async def test_a_shorter_interval_counts_from_now_on(rig: Rig) -> None:
    rig.board.follow(ONE, {P0: "a"}, 60)
    await rig.board.ask(ONE)
    rig.board.follow(ONE, {P0: "a"}, 1)
    rig.now += 1
    assert rig.board.due() == [ONE]


async def test_a_deployment_without_a_group_in_service_has_been_asked_all_the_same(rig: Rig) -> None:
    rig.board.follow(ONE, {}, 15)
    await rig.board.ask(ONE)
    assert rig.board.samples(ONE) == {}


async def test_a_forgotten_deployment_is_neither_asked_nor_woken(rig: Rig) -> None:
    rig.board.follow(ONE, {P0: "a"}, 15)
    rig.engines.gate.clear()
    asking = asyncio.create_task(rig.board.ask(ONE))
    await asyncio.sleep(0)
    rig.board.forget(ONE)
    rig.engines.gate.set()
    await asking
    assert (rig.woken, rig.board.due(), rig.board.samples(ONE)) == ([], [], None)


async def test_slow_engines_hold_up_no_other_deployment_and_are_not_asked_twice_at_once(rig: Rig) -> None:
    rig.board.follow(ONE, {P0: "slow"}, 15)
    rig.engines.gate.clear()
    running = asyncio.create_task(rig.board.run())
    await asyncio.sleep(0.01)
    rig.now += 100
    assert rig.board.due() == []
    rig.board.follow(OTHER, {P0: "quick"}, 15)
    assert rig.board.due() == [OTHER]
    rig.engines.gate.set()
    await asyncio.sleep(0.01)
    assert rig.woken == [ONE]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- over HTTP ---


async def test_leaders_are_asked_for_their_state_and_only_good_answers_count() -> None:
    async def state(request: web.Request) -> web.Response:
        return web.json_response(STATE)

    async def starting(request: web.Request) -> web.Response:
        return web.json_response({**STATE, "ready": False})

    async def broken(request: web.Request) -> web.Response:
        return web.Response(text="{", content_type="application/json")

    servers = []
    for handler in (state, starting, broken):
        app = web.Application()
        app.add_routes([web.get("/state", handler)])
        servers.append(TestServer(app))
    async with servers[0], servers[1], servers[2], Engines() as engines:
        addresses = {GroupKey("decode", "r", i): f"127.0.0.1:{server.port}" for i, server in enumerate(servers)}
        addresses[GroupKey("decode", "r", 3)] = "127.0.0.1:1"
        said = await engines.samples(addresses, lambda: 9.0)
    assert said == {D0: SAMPLE}
