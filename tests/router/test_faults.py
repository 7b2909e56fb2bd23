"""What happens when engines fail: other groups before the first byte, an explicit error after it, no leg left open."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest
from tests.router.fakes import QUICK, rig, token_event, wait_until

STREAM = b"".join(map(token_event, "abc")) + b"data: [DONE]\n\n"
RETRIED = [
    ("decode", "die"),
    ("decode", "503"),
    ("decode", "500"),
    ("decode", "hang"),
    ("decode", "die_after_ticket"),
    ("decode", "report_retriable"),
    ("decode", "no_stream"),
    ("decode", "no_ticket"),
    ("prefill", "503"),
    ("prefill", "500"),
    ("prefill", "die"),
    ("prefill", "hang"),
    ("prefill", "409:stale_ticket"),
    ("prefill", "409:prompt_mismatch"),
]


@pytest.mark.parametrize(("role", "fault"), RETRIED)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_before_the_first_byte_is_retried_on_another_group(role, fault, stream):
    async with rig(num_prefill=2, num_decode=2) as r:
        faulty, other = getattr(r, role)
        faulty.always = fault
        for _ in range(2):  # one of the two goes to the faulty group first
            status, body = await r.ask(stream=stream)
            assert status == 200
            assert body == STREAM if stream else b'"abc"' in body
        assert faulty.num_legs >= 1
        assert other.num_legs >= 2
        assert await r.settled()
        assert r.outcomes() == {"ok": 2}


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_group_that_refuses_connections_is_passed_over_and_cools_down(role):
    async with rig(num_prefill=2, num_decode=2) as r:
        gone, _ = getattr(r, role)
        await gone.stop()
        for _ in range(6):
            assert (await r.ask(stream=True))[1] == STREAM
        failed = [group for group in r.router.fleet.groups() if group.circuit.num_failures]
        assert [group.url for group in failed] == [gone.url]
        assert await r.settled()


@pytest.mark.parametrize("fault", ["503", "die", "hang"])
async def test_a_prefill_leg_of_several_that_fails_has_all_prompts_tried_again(fault):
    async with rig(num_prefill=2) as r:
        r.decode[0].num_prompts = 3
        r.prefill[0].faults += ["", fault]  # of the first prompt and the third
        async with r.post({"prompt": ["x", "y", "z"], "stream": True}) as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await r.settled()
        assert r.outcomes() == {"ok": 1}


async def test_a_decode_group_that_is_lost_between_its_tickets_gives_way_to_another():
    async with rig(num_decode=2) as r:
        for engine in r.decode:
            engine.num_prompts = 2
        r.decode[0].faults.append("die_after_ticket")
        async with r.post({"prompt": ["x", "y"]}) as response:
            assert response.status == 200
        assert await r.settled()
        assert r.outcomes() == {"ok": 1}


async def test_the_same_decode_group_serves_again_when_only_prefill_failed():
    async with rig(num_prefill=2, num_decode=1) as r:
        r.prefill[0].always = "500"
        for _ in range(2):
            assert (await r.ask(stream=True))[1] == STREAM
        assert r.prefill[0].num_legs >= 1
        assert r.decode[0].num_legs == 2 + r.prefill[0].num_legs
        ids = [headers["X-Request-Id"] for headers, _ in r.decode[0].seen]
        assert len(set(ids)) == len(ids), "each attempt has its own id"


async def test_a_frozen_prefill_group_is_at_fault_when_decode_gets_no_kv():
    async with rig(num_prefill=2, num_decode=1, limits=replace(QUICK, prefill_seconds=20)) as r:
        frozen = r.prefill[0]
        frozen.always = "hang"
        r.decode[0].always = "lease"
        for _ in range(2):  # the only decode group is asked again, the frozen prefill group is not
            assert (await r.ask(stream=True))[1] == STREAM
        assert frozen.num_legs >= 1
        failed = [group.url for group in r.router.fleet.groups() if group.circuit.num_failures]
        assert failed == [frozen.url]
        assert await r.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_no_request_makes_more_than_the_allowed_attempts(role):
    async with rig(num_prefill=5, num_decode=5, limits=replace(QUICK, max_attempts=3)) as r:
        for engine in getattr(r, role):
            engine.always = "503"
        status, body = await r.ask()
        assert status == 503
        assert json.loads(body)["error"]["message"] == "fault 503"
        assert sum(engine.num_legs for engine in getattr(r, role)) == 3
        assert max(engine.num_legs for engine in getattr(r, role)) == 1
        assert await r.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("code", ["draining", "starting"])
async def test_groups_that_turn_a_request_away_use_up_no_attempts(role, code):
    async with rig(num_prefill=5, num_decode=5, limits=replace(QUICK, max_attempts=1)) as r:
        for engine in getattr(r, role)[:4]:
            engine.always = f"503:{code}"
        for _ in range(2):
            assert (await r.ask(stream=True))[1] == STREAM
        assert sum(engine.num_legs for engine in getattr(r, role)[:4]) >= 4
        assert await r.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_request_waits_for_a_group_that_is_about_to_end_its_cool_down(role):
    async with rig() as r:
        engine = getattr(r, role)[0]
        engine.faults.append("die")
        assert (await r.ask())[0] == 503
        answers = await asyncio.gather(*(r.ask(stream=True) for _ in range(3)))
        assert [body for _, body in answers] == [STREAM] * 3
        assert await r.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_group_that_failed_a_request_is_not_asked_again_even_if_it_is_the_only_one(role):
    async with rig() as r:
        (only,) = getattr(r, role)
        only.always = "500"
        assert (await r.ask())[0] == 500
        assert only.num_legs == 1
        assert await r.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("status", [400, 429])
async def test_a_refusal_for_the_client_is_relayed_unchanged_and_not_retried(role, status):
    async with rig(num_prefill=2, num_decode=2) as r:
        for engine in getattr(r, role):
            engine.always = str(status)
        got, body = await r.ask()
        assert got == status
        assert json.loads(body)["error"]["message"] == f"fault {status}"
        assert sum(engine.num_legs for engine in getattr(r, role)) == 1
        assert await r.settled()


async def test_an_error_event_that_is_final_becomes_the_response():
    async with rig(num_decode=2) as r:
        for decode in r.decode:
            decode.always = "report_final"
        status, body = await r.ask(stream=True)
        assert status == 400
        assert json.loads(body)["error"]["message"] == "report_final"
        assert sum(decode.num_legs for decode in r.decode) == 1
        assert await r.settled()


async def test_prompt_mismatch_everywhere_is_a_server_error_not_the_clients():
    async with rig() as r:
        r.prefill[0].always = "409:prompt_mismatch"
        status, body = await r.ask()
        assert status == 500
        assert json.loads(body)["error"]["code"] == "prompt_mismatch"


async def test_a_ticket_goes_on_to_the_prefill_group_with_the_same_cache_layout():
    async with rig(num_prefill=5, num_decode=1) as r:
        for prefill in r.prefill[:4]:
            prefill.fingerprint = "F2"
        for _ in range(4):
            assert (await r.ask(stream=True))[1] == STREAM
        assert r.decode[0].num_legs == 4, "a refusal costs no new ticket"
        assert max(prefill.num_legs for prefill in r.prefill[:4]) == 1, "and is remembered"
        assert await r.settled()


async def test_a_decode_group_without_a_matching_prefill_group_gives_way_to_one_that_has():
    async with rig(num_prefill=1, num_decode=2) as r:
        r.decode[0].fingerprint = "F2"
        for _ in range(3):
            assert (await r.ask(stream=True))[1] == STREAM
        assert await r.settled()


@pytest.mark.parametrize("fault", ["die_mid_stream", "die_mid_event", "hang_mid_stream", "no_done"])
@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_that_breaks_ends_with_an_explicit_error_and_no_done(fault, unified):
    async with rig(1, 1, int(unified)) as r:
        engine = (r.unified or r.decode)[0]
        engine.always = fault
        status, body = await r.ask(stream=True)
        assert status == 200
        *tokens, error, rest = body.split(b"\n\n")
        expected = "abc" if fault == "no_done" else "ab"
        assert b"".join(token + b"\n\n" for token in tokens) == b"".join(map(token_event, expected))
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        assert rest == b""
        assert engine.num_legs == 1, "never asked twice once the client has tokens"
        assert await r.settled()
        assert r.outcomes() == {"broken": 1}


@pytest.mark.parametrize("fault", ["die", "503", "hang"])
async def test_unified_groups_are_retried_too(fault):
    async with rig(0, 0, 2, limits=replace(QUICK, ticket_seconds=0.2, prefill_seconds=0.2)) as r:
        r.unified[0].always = fault
        for _ in range(2):
            assert (await r.ask(stream=True))[1] == STREAM
        assert await r.settled()


async def test_the_deadline_of_the_whole_request_is_kept():
    async with rig(num_prefill=3, num_decode=3, limits=replace(QUICK, request_seconds=0.3, ticket_seconds=10)) as r:
        for decode in r.decode:
            decode.always = "hang"
        started_at = asyncio.get_running_loop().time()
        status, body = await r.ask()
        assert status == 504
        assert json.loads(body)["error"]["code"] == "deadline_exceeded"
        assert asyncio.get_running_loop().time() - started_at < 1.0
        assert await r.settled()


async def test_the_deadline_in_a_stream_is_an_error_event():
    async with rig(limits=replace(QUICK, request_seconds=0.5)) as r:
        r.decode[0].tokens = ["t"] * 100
        r.decode[0].token_seconds = 0.05
        status, body = await r.ask(stream=True)
        assert status == 200
        assert body.startswith(token_event("t"))
        assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        assert await r.settled()


@pytest.mark.parametrize("where", ["before_ticket", "during_prefill", "mid_stream", "whole"])
async def test_a_client_that_leaves_closes_both_legs(where):
    async with rig(limits=replace(QUICK, ticket_seconds=20, prefill_seconds=20, idle_seconds=20)) as r:
        if where == "before_ticket":
            r.decode[0].always = "hang"
        elif where in ("during_prefill", "whole"):
            r.prefill[0].always = "hang"
        else:
            r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 1000, 0.02
        request = asyncio.create_task(r.ask(stream=where != "whole"))
        await asyncio.sleep(0.2)
        assert r.decode[0].open_legs == 1
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert await r.settled()
        assert r.outcomes() == {"client_gone": 1}


async def test_a_client_that_does_not_read_holds_the_engine_back_and_is_cut_off():
    async with rig(limits=replace(QUICK, request_seconds=1.5, idle_seconds=20)) as r:
        r.decode[0].tokens = ["t" * 100_000] * 1000
        reader, writer = await asyncio.open_connection(*r.base.removeprefix("http://").split(":"), limit=1024)
        body = b'{"prompt": "x", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readline()
        await asyncio.sleep(1.0)
        assert len(r.decode[0].sent_at) < 900, "the router buffers without bound"
        await asyncio.sleep(1.8)
        assert await r.settled()
        writer.close()


@pytest.mark.parametrize("limit", ["idle_seconds", "request_seconds"])
async def test_a_client_that_does_not_read_is_its_own_fault_and_leaves_no_connection(limit):
    async with rig(limits=replace(QUICK, **{"idle_seconds": 20, limit: 0.6})) as r:
        r.decode[0].tokens = ["t" * 100_000] * 1000
        reader, writer = await asyncio.open_connection(*r.base.removeprefix("http://").split(":"), limit=1024)
        body = b'{"prompt": "x", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readline()
        await wait_until(lambda: not r.router.relay.exchanges)
        assert await r.settled()
        assert all(not group.circuit.num_failures for group in r.router.fleet.groups())
        server = r.router._runner.server
        await wait_until(lambda: not server.connections)
        writer.close()


async def test_connections_to_engines_notice_that_their_machine_is_gone():
    async with rig() as r:
        connections = [c for pool in r.router.engines._session.connector._conns.values() for c, _ in pool]
        assert connections, "the probes keep some"
        for connection in connections:
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count <= 30


async def test_with_no_ready_group_the_answer_is_503_with_retry_after_and_the_reason():
    async with rig() as r:
        r.prefill[0].ready = False
        await wait_until(r.router.fleet.missing)
        async with r.post({"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            error = (await response.json())["error"]
        assert error["message"] == "no prefill group can take the request: of 1: 1 not ready"
        assert r.decode[0].num_legs == 0, "no ticket is asked for in vain"


async def test_a_restarted_group_serves_again_after_its_cool_down():
    async with rig() as r:
        await r.decode[0].stop()
        assert (await r.ask())[0] == 503
        await r.decode[0].start()
        for _ in range(200):
            if (await r.ask())[0] == 200:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the group is never asked again")
        assert all(not group.circuit.num_failures for group in r.router.fleet.groups())
