"""Groups that stop responding are found within a limit, whatever they were doing; those that are only slow are not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests.router.fakes import QUICK, rig, token_event, wait_until

from headrace_engine.core import Role
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.group import Endpoint
from headrace_engine.router.liveness import is_due

STREAM = b"".join(map(token_event, "abc")) + b"data: [DONE]\n\n"
LIMIT = 0.3
# Every other deadline is longer than a test may take.
PATIENT = replace(
    QUICK, ticket_seconds=60, prefill_seconds=60, idle_seconds=60, request_seconds=60, unresponsive_seconds=LIMIT
)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_request_on_a_group_that_hangs_succeeds_elsewhere(role: str, stream: bool) -> None:
    async with rig(num_prefill=2, num_decode=2, limits=PATIENT) as r:
        hung, _ = getattr(r, role)
        hung.running.clear()
        for _ in range(4):  # only the first that meets it waits for it
            status, body = await r.ask(stream=stream)
            assert status == 200
            assert body == STREAM if stream else b'"abc"' in body
        lost = [group.url for group in r.router.fleet.groups() if not group.responds]
        assert lost == [hung.url]
        hung.running.set()
        assert await r.settled()


async def test_an_answer_that_is_not_streamed_is_made_elsewhere_when_its_group_hangs_while_making_it() -> None:
    async with rig(num_decode=2, limits=PATIENT) as r:
        r.prefill[0].always = "slow"
        request = asyncio.create_task(r.ask())
        await wait_until(lambda: any(decode.open_legs for decode in r.decode))
        hung = next(decode for decode in r.decode if decode.open_legs)
        hung.running.clear()
        status, body = await request
        assert (status, b'"abc"' in body) == (200, True)
        hung.running.set()
        assert await r.settled()


@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_whose_group_hangs_ends_with_an_explicit_error(unified: bool) -> None:
    async with rig(1, 1, int(unified), limits=PATIENT) as r:
        engine = (r.unified or r.decode)[0]
        engine.may_send = asyncio.Semaphore(2)
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: len(engine.sent_at) == 2)
        engine.running.clear()
        status, body = await request
        assert status == 200
        assert body.startswith(token_event("a") + token_event("b") + b"data: ")
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "stream_broken"
        assert "stopped responding" in error["message"]
        engine.running.set()
        engine.may_send.release()
        assert await r.settled()


async def test_a_group_that_is_no_longer_listed_is_still_watched_for_the_legs_it_has() -> None:
    async with rig(limits=PATIENT) as r:
        r.decode[0].may_send = asyncio.Semaphore(1)
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].sent_at)
        r.router.fleet.replace([])
        r.decode[0].running.clear()
        _, body = await request
        assert b"stream_broken" in body
        r.decode[0].running.set()
        r.decode[0].may_send.release()
        await wait_until(lambda: not r.router.fleet.watched())


async def test_a_group_that_is_silent_but_answers_when_asked_is_waited_for() -> None:
    limit = 3 * LIMIT  # a busy machine may be late with the answer
    async with rig(limits=replace(PATIENT, unresponsive_seconds=limit)) as r:
        r.decode[0].may_send = asyncio.Semaphore(1)
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].sent_at)
        (group,) = r.router.fleet.groups(Role.DECODE)
        first_heard = group.heard_at
        await wait_until(lambda: group.heard_at > first_heard + limit)
        r.decode[0].may_send.release()
        r.decode[0].may_send.release()
        assert (await request)[1] == STREAM


async def test_a_group_that_answers_again_serves_again() -> None:
    async with rig(limits=PATIENT) as r:
        r.decode[0].running.clear()
        status, body = await r.ask()
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unresponsive")
        status, body = await r.ask()
        assert status == 503
        assert "not responding" in json.loads(body)["error"]["message"], "nobody else has to find out"
        r.decode[0].running.set()
        await wait_until(lambda: all(group.responds for group in r.router.fleet.groups()))
        assert (await r.ask())[0] == 200


DUE = {
    "idle, however long ago it was heard": (0, 90.0, True, True, False),
    "busy, heard just now": (1, 99.0, True, True, False),
    "busy, silent for a third of the limit": (1, 95.0, True, True, True),
    "lost, since it may be back": (0, 99.0, True, False, True),
    "lost and not ready, with nothing under way": (0, 99.0, False, False, False),
}


@pytest.mark.parametrize(("num_live", "heard_at", "ready", "responds", "due"), DUE.values(), ids=DUE.keys())
def test_who_is_asked(num_live: int, heard_at: float, ready: bool, responds: bool, due: bool) -> None:
    fleet = Fleet()
    fleet.replace([Endpoint(Role.DECODE, "http://a:8000", "a", ready)])
    (group,) = fleet.groups()
    group.num_live, group.heard_at, group.responds = num_live, heard_at, responds
    assert is_due(group, 100.0, 15.0) is due
