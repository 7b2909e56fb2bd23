"""Everything around generation: readiness, state, metrics, models, refusals at the door, drain."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from tests.router.fakes import PATH, QUICK, rig, token_event, wait_until

from headrace_engine.router.app import Router


async def get(r, path: str) -> tuple[int, dict]:
    async with r.http.get(r.base + path) as response:
        return response.status, await response.json()


async def test_ready_follows_the_engines():
    async with rig() as r:
        assert await get(r, "/ready") == (200, {"status": "ready"})
        r.decode[0].ready = False
        await wait_until(r.router.fleet.missing)
        assert await get(r, "/ready") == (503, {"status": "waiting", "missing_roles": ["decode"]})
        r.decode[0].ready = True
        await wait_until(lambda: not r.router.fleet.missing())
        assert (await get(r, "/ready"))[0] == 200
        assert (await get(r, "/health"))[0] == 200


async def test_a_router_without_a_role_stays_reachable_and_says_what_is_missing():
    """A Service keeps only routers that are synced; one that were taken out with its engines could only be refused."""
    async with rig() as r:
        r.decode[0].ready = False
        await wait_until(r.router.fleet.missing)
        assert await get(r, "/synced") == (200, {"status": "synced"})
        async with r.http.post(r.base + PATH, json={"model": "m", "prompt": "p"}) as response:
            assert response.status == 503
            assert "decode" in (await response.json())["error"]["message"]


async def test_a_router_that_knows_nothing_yet_wants_no_requests():
    async with rig() as r:
        r.router.fleet.synced = False
        assert (await get(r, "/synced"))[0] == 503


async def test_an_engine_that_stops_answering_is_given_a_few_probes():
    async with rig(num_decode=2) as r:
        await r.decode[0].stop()
        await asyncio.sleep(0.5)
        assert r.router.fleet.num_ready(r.decode[0].role) == 2, "one missed probe is no verdict"
        await wait_until(lambda: r.router.fleet.num_ready(r.decode[0].role) == 1)


async def test_state_shows_groups_with_their_load():
    async with rig() as r:
        r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 50, 0.02
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].open_legs == 1 and not r.prefill[0].open_legs)
        _, state = await get(r, "/state")
        assert state["in_flight"] == 1
        assert state["missing_roles"] == []
        assert state["roles"]["decode"] == [
            {
                "name": r.decode[0].url,
                "url": r.decode[0].url,
                "ready": True,
                "responds": True,
                "fingerprint": "",
                "in_flight": 1,
                "connection_failures": 0,
                "cool_down_seconds": 0.0,
            }
        ]
        await request


async def test_metrics_count_what_happened():
    async with rig(num_decode=2) as r:
        r.decode[0].faults.append("503")  # whichever of the two requests it gets first
        for _ in range(2):
            await r.ask(stream=True)
        async with r.http.get(r.base + "/metrics") as response:
            text = await response.text()
        assert 'headrace_router_requests_total{outcome="ok"} 2.0' in text
        assert "headrace_router_retries_total 1.0" in text
        assert 'headrace_router_leg_failures_total{cause="refused",role="decode"} 1.0' in text
        assert 'headrace_router_leg_seconds_count{leg="ticket"} 2.0' in text
        assert 'headrace_router_leg_seconds_count{leg="prefill"} 2.0' in text
        assert "headrace_router_time_to_first_byte_seconds_count 2.0" in text
        assert f'headrace_router_in_flight{{group="{r.decode[0].url}",role="decode"}} 0.0' in text
        assert 'headrace_router_ready_groups{role="decode"} 2.0' in text


async def test_models_come_from_an_engine_and_without_one_from_the_flag():
    async with rig() as r:
        assert (await get(r, "/v1/models"))[1]["data"] == [{"id": "tiny", "object": "model"}]
        for engine in r.engines:
            await engine.stop()
        status, body = await get(r, "/v1/models")
        assert status == 200
        assert body["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "data", "status"),
    [
        ("POST", PATH, b"{nonsense", 400),
        ("POST", PATH, b"", 400),
        ("POST", PATH, b'{"prompt": "x", "headrace_ticket": {}}', 400),
        ("POST", PATH, b'{"prompt": "%b"}' % (b"x" * 3000), 413),
        ("GET", PATH, None, 405),
        ("POST", "/v1/nothing", b"{}", 404),
    ],
)
async def test_bad_requests_get_the_openai_error_body_and_reach_no_engine(method, path, data, status):
    async with rig(limits=replace(QUICK, max_body_bytes=2000)) as r:
        async with r.http.request(method, r.base + path, data=data) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert not any(engine.num_legs for engine in r.engines)


async def test_a_body_that_is_no_gzip_is_refused():
    async with rig() as r, r.post(b"no gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400


async def test_beyond_the_limit_of_requests_in_flight_the_answer_is_429():
    async with rig(limits=replace(QUICK, max_in_flight=1)) as r:
        r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 20, 0.02
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].open_legs == 1)
        async with r.post({"prompt": "x"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        assert (await request)[0] == 200


async def test_a_drain_lets_streams_end_and_takes_no_new_connection():
    async with rig(limits=replace(QUICK, drain_seconds=5)) as r:
        r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 20, 0.02
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].open_legs == 1)
        drain = asyncio.create_task(r.router.drain())
        await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as other:
            with pytest.raises(aiohttp.ClientConnectionError):
                await other.get(r.base + "/health")
        status, body = await request
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        await drain


async def test_a_router_that_leaves_goes_on_serving_and_asks_clients_to_connect_anew():
    async with rig(limits=replace(QUICK, leave_seconds=0.5)) as r:
        assert (await r.ask())[0] == 200  # the client now keeps a connection
        drain = asyncio.create_task(r.router.drain())
        await asyncio.sleep(0)
        for path in ("/v1/completions", "/v1/models", "/v1/completions"):
            request = r.post({"prompt": "x"}) if path == "/v1/completions" else r.http.get(r.base + path)
            async with request as response:
                assert response.status == 200
                assert response.headers["Connection"] == "close"
        assert (await get(r, "/ready"))[0] == 503
        assert (await get(r, "/synced"))[0] == 200, "where there is no other router, this one is still the Service's"
        await drain
        with pytest.raises(aiohttp.ClientConnectionError):
            await r.ask()


async def test_a_request_on_a_kept_connection_is_served_while_others_end():
    async with rig(limits=replace(QUICK, drain_seconds=5)) as r:
        assert (await r.ask())[0] == 200
        async with aiohttp.ClientSession() as other:
            r.decode[0].may_send = asyncio.Semaphore(1)
            stream = asyncio.create_task(other.post(r.base + PATH, json={"prompt": "x", "stream": True}))
            await wait_until(lambda: r.decode[0].sent_at)
            drain = asyncio.create_task(r.router.drain())
            await asyncio.sleep(0.05)
            async with r.post({"prompt": "x"}) as response:
                assert response.status == 200
                assert response.headers["Connection"] == "close"
            assert not drain.done()
            for _ in range(2):
                r.decode[0].may_send.release()
            assert (await (await stream).read()).endswith(b"data: [DONE]\n\n")
        await drain


async def test_a_drain_ends_what_does_not_end_by_itself_with_an_explicit_error():
    async with rig(limits=replace(QUICK, drain_seconds=0.3)) as r:
        r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 1000, 0.02
        request = asyncio.create_task(r.ask(stream=True))
        await wait_until(lambda: r.decode[0].open_legs == 1)
        await r.router.drain()
        status, body = await request
        assert status == 200
        assert body.startswith(token_event("t"))
        last = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["message"] == "the router is shutting down"
        assert await r.settled()


async def test_a_source_that_fails_leaves_the_router_serving(caplog):
    class Failing:
        async def run(self) -> None:
            raise RuntimeError("no source")

    router = Router("m", QUICK)
    port = await router.start("127.0.0.1", 0, Failing())
    try:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/ready") as response:
            assert response.status == 503
        assert "last known ones stay" in caplog.text
    finally:
        await router.stop()


async def test_any_ready_engine_tokenizes_and_one_that_fails_is_passed_over():
    async with rig() as r:
        r.decode[0].faults.append("503")
        r.prefill[0].faults.append("500")
        body = b'{"prompt": "x"}'
        async with r.http.post(r.base + "/tokenize", data=body, headers={"X-Request-Id": "mine"}) as response:
            assert response.status == 503, "no engine is left to ask"
        async with r.http.post(r.base + "/tokenize", data=body, headers={"X-Request-Id": "mine"}) as response:
            assert (response.status, await response.json()) == (200, {"count": 1, "tokens": [7]})
            assert response.headers["X-Request-Id"] == "mine"
        (headers, seen), *_ = r.decode[0].seen
        assert (headers["X-Request-Id"], seen) == ("mine", body)
        assert "x-headrace-leg" not in headers
