"""The benchmark's client times tokens, not transport, and refuses servers whose figures would mean nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web
from tests.bench import client

GAP_SECONDS = 0.02
AT_ONCE = [0]  # how many requests the server had at the same time


async def _complete(request: web.Request) -> web.StreamResponse:
    AT_ONCE.append(AT_ONCE[-1] + 1)
    try:
        return await _answer(request)
    finally:
        AT_ONCE.append(AT_ONCE[-1] - 1)


async def _answer(request: web.Request) -> web.StreamResponse:
    """Tokens at a known pace; the model's name selects how the server misbehaves."""
    body = await request.json()
    if body["model"] == "refuses":
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    num_tokens = body["max_tokens"] - (body["model"] == "stops early")
    for _ in range(num_tokens):
        await asyncio.sleep(GAP_SECONDS)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    if body["model"] == "fails":
        await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
    usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
    await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
    return response


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread: the client runs an event loop of its own."""
    ready, stop, port = threading.Event(), asyncio.Event(), 0
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal port
        app = web.Application()
        app.router.add_post("/v1/completions", _complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def _measure(url: str, model: str, **changes: int) -> client.Sample:
    load = {"concurrency": 1, "num_requests": 1, "prompt_tokens": 4, "output_tokens": 5, **changes}
    return client.measure(url, model, seed="test", **load)


def test_time_per_token_excludes_the_first(url: str) -> None:
    sample = _measure(url, "good")
    assert sample.time_to_first_token >= GAP_SECONDS
    (timing,) = sample.requests
    assert timing.duration == pytest.approx(timing.time_to_first_token + 4 * timing.time_per_token)


def test_so_many_requests_as_asked_for_are_made_at_once_and_their_tokens_add_up(url: str) -> None:
    AT_ONCE[:] = [0]
    together = _measure(url, "good", concurrency=4, num_requests=8)
    assert 2 <= max(AT_ONCE) <= 4  # a busy machine may begin the last when the first is done
    assert len(together.requests) == 8
    last = max(timing.duration for timing in together.requests)
    assert 0 < together.tokens_per_second <= 8 * 5 / last


@pytest.mark.parametrize(
    ("model", "said"),
    [("refuses", "404.*no such model"), ("fails", "out of memory"), ("stops early", "4 tokens.*5 were asked for")],
)
def test_server_that_misbehaves_is_not_measured(url: str, model: str, said: str) -> None:
    with pytest.raises(client.BenchmarkError, match=said):
        _measure(url, model)


def test_other_machines_are_never_measured() -> None:
    with pytest.raises(ValueError, match=r"only servers on 127\.0\.0\.1"):
        client.check_loopback("http://10.0.0.1:8000")


def test_prompts_repeat_for_a_seed_and_hold_no_special_token() -> None:
    first, again, other = (client.random_prompts(3, 50, seed) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other
    assert all(4 <= token <= 259 for prompt in first for token in prompt)
