"""The path of a request that goes well: what each leg sees and what the client gets."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from tests.router.fakes import rig, token_event, wait_until, whole_answer

from headrace_engine.router.config import Limits


async def test_a_stream_reaches_the_client_byte_for_byte():
    async with rig() as r:
        status, body = await r.ask(stream=True)
        assert status == 200
        assert body == b"".join(map(token_event, "abc")) + b"data: [DONE]\n\n"
        assert await r.settled()
        assert r.outcomes() == {"ok": 1}


UNIFIED = {"num_prefill": 0, "num_decode": 0, "num_unified": 1}
NAMED = [
    ("/v1/messages", "message_start", "message_stop"),
    ("/v1/responses", "response.created", "response.completed"),
]


@pytest.mark.parametrize(("path", "first", "last"), NAMED)
@pytest.mark.parametrize(
    "groups", [{}, {"num_prefill": 0, "num_decode": 0, "num_unified": 1}], ids=["apart", "unified"]
)
async def test_streams_of_named_events_pass_and_end_with_their_own_last_event(path, first, last, groups):
    events = [f"event: {name}\ndata: {{}}\n\n".encode() for name in (first, "delta", last)]
    async with rig(**groups) as r:
        engine = r.unified[0] if groups else r.decode[0]
        engine.events = events
        async with r.post({"stream": True}, path) as response:
            assert await response.read() == b"".join(events)
        engine.events = events[:2]
        async with r.post({"stream": True}, path) as response:
            *_, error = (await response.read()).decode().strip().split("\n\n")
        name, data = error.split("\n")
        assert name == "event: error"
        told = json.loads(data.removeprefix("data: "))
        assert (told["type"], told["error"]["code"]) == ("error", "stream_broken")
        assert await r.settled()
        assert r.outcomes() == {"ok": 1, "broken": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_group_that_wants_no_kv_answers_alone(stream):
    async with rig() as r:
        r.decode[0].wants_kv = False
        async with r.post({"prompt": "x", "prompt_logprobs": 1, "stream": stream}) as response:
            body = await response.read()
        assert response.status == 200
        assert (b"[DONE]" in body) is stream
        assert [engine.num_legs for engine in r.prefill] == [0] * len(r.prefill)
        assert await r.settled()
        assert r.outcomes() == {"ok": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_ticket_of_a_request_has_a_prefill_leg_of_its_own(stream):
    async with rig(num_prefill=2) as r:
        r.decode[0].num_prompts = 3
        async with r.post({"prompt": ["x", "y", "z"], "stream": stream}) as response:
            body = await response.read()
        assert response.status == 200
        assert b"ticket" not in body
        assert (b"[DONE]" in body) is stream
        legs = [json.loads(seen) for engine in r.prefill for _, seen in engine.seen]
        assert sorted(leg["headrace_ticket"]["prompt_index"] for leg in legs) == [0, 1, 2]
        assert all(leg["prompt"] == ["x", "y", "z"] for leg in legs)
        assert [engine.num_legs > 0 for engine in r.prefill] == [True, True]
        assert await r.settled()
        assert r.outcomes() == {"ok": 1}


@pytest.mark.parametrize(("fault", "outcome"), [("report_final", "refused"), ("die_after_ticket", "failed")])
async def test_what_ends_it_before_its_answer_is_told_as_ever(fault, outcome):
    async with rig(limits=Limits(max_attempts=1)) as r:
        r.decode[0].wants_kv = False
        r.decode[0].faults.append(fault)
        async with r.post({"prompt": "x"}) as response:
            assert response.status == {"refused": 400, "failed": 503}[outcome]
        assert await r.settled()
        assert r.outcomes() == {outcome: 1}


async def test_a_whole_answer_has_its_real_status_and_json_body():
    async with rig() as r:
        async with r.post({"prompt": "x"}) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert await response.json() == whole_answer(["a", "b", "c"])
        assert await r.settled()


async def test_decode_sees_the_clients_own_body_and_prefill_the_same_with_the_ticket_spliced_in():
    body = b' {\n "prompt": "\\u00e9 \xc3\xa9", "max_tokens" : 3, "seed": 1.50}'
    async with rig() as r:
        async with r.post(body) as response:
            assert response.status == 200
        decode_headers, decode_body = r.decode[0].seen[0]
        prefill_headers, prefill_body = r.prefill[0].seen[0]
    assert decode_body == body
    assert decode_headers["x-headrace-leg"] == "decode"
    assert prefill_headers["x-headrace-leg"] == "prefill"
    assert prefill_body.endswith(b'"prompt": "\\u00e9 \xc3\xa9", "max_tokens" : 3, "seed": 1.50}')
    assert list(json.loads(prefill_body)) == ["headrace_ticket", "prompt", "max_tokens", "seed"]


async def test_both_legs_carry_the_clients_request_id_and_authorization_and_nothing_hop_by_hop():
    sent = {
        "X-Request-Id": "mine-1",
        "Authorization": "Bearer k",
        "Cookie": "c=1",
        "x-headrace-leg": "prefill",
        "Keep-Alive": "timeout=5",
    }
    async with rig() as r:
        async with r.post({"prompt": "x"}, headers=sent) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
        for headers, _ in (r.decode[0].seen[0], r.prefill[0].seen[0]):
            assert headers["X-Request-Id"] == "mine-1"
            assert headers["Authorization"] == "Bearer k"
            assert "Cookie" not in headers
            assert "Keep-Alive" not in headers
        assert r.decode[0].seen[0][0]["x-headrace-leg"] == "decode"


async def test_without_an_id_one_is_made():
    async with rig() as r:
        async with r.post({"prompt": "x"}) as response:
            request_id = response.headers["X-Request-Id"]
        assert len(request_id) == 32
        assert r.decode[0].seen[0][0]["X-Request-Id"] == request_id


async def test_tokens_arrive_as_they_are_made():
    async with rig() as r:
        r.decode[0].tokens = list("abcdef")
        r.decode[0].may_send = asyncio.Semaphore(1)
        async with r.post({"prompt": "x", "stream": True}) as response:
            for token in "abcdef":
                # The engine makes the next token only once this one is here, so nobody on the way may hold it back.
                assert (await response.content.readany()).startswith(token_event(token))
                r.decode[0].may_send.release()


async def test_a_body_of_many_megabytes_passes():
    async with rig() as r:
        body = {"prompt": "x" * 8_000_000}
        async with r.post(body) as response:
            assert response.status == 200
        assert json.loads(r.prefill[0].seen[0][1])["prompt"] == body["prompt"]


async def test_a_compressed_body_is_unpacked_for_the_engines():
    async with rig() as r:
        data = gzip.compress(b'{"prompt": "x"}')
        async with r.post(data, headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 200
        headers, body = r.decode[0].seen[0]
        assert body == b'{"prompt": "x"}'
        assert "Content-Encoding" not in headers


async def test_requests_spread_evenly_over_groups():
    async with rig(num_prefill=2, num_decode=3) as r:
        for decode in r.decode:
            decode.token_seconds = 0.1
        answers = await asyncio.gather(*(r.ask(stream=True) for _ in range(12)))
        assert all(status == 200 for status, _ in answers)
        assert [decode.num_legs for decode in r.decode] == [4, 4, 4]
        assert [prefill.num_legs for prefill in r.prefill] == [6, 6]


@pytest.mark.parametrize("stream", [True, False])
async def test_unified_groups_get_the_request_as_it_came(stream):
    async with rig(0, 0, 2) as r:
        status, body = await r.ask(stream=stream)
        assert status == 200
        if stream:
            assert body.endswith(token_event("c") + b"data: [DONE]\n\n")
        else:
            assert json.loads(body) == whole_answer(["a", "b", "c"])
        engine = next(engine for engine in r.unified if engine.num_legs)
        assert "x-headrace-leg" not in engine.seen[0][0]
        assert await r.settled()


async def test_connections_to_engines_are_kept():
    async with rig() as r:
        for stream in (True, False) * 5:
            assert (await r.ask(stream=stream))[0] == 200
        connector = r.router.engines._session.connector
        await wait_until(lambda: not connector._acquired)
        num_connections = sum(len(connections) for connections in connector._conns.values())
        assert num_connections <= 4  # a leg's and a probe's for each of the two groups


@pytest.mark.slow
async def test_a_thousand_streams_at_once():
    limits = Limits(connect_seconds=60)  # client, router and engines share one thread here
    async with rig(num_prefill=2, num_decode=2, limits=limits) as r:
        for decode in r.decode:
            decode.token_seconds = 0.2
        answers = await asyncio.gather(*(r.ask(stream=True) for _ in range(1000)))
        assert {status for status, _ in answers} == {200}
        assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers)
        assert await r.settled()
