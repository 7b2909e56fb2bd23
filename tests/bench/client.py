"""A streaming client for any OpenAI-style server, in a closed loop.

Prompts are fresh random token ids, so that no prefix is ever shared, and end-of-sequence is ignored, so that every
server makes the same number of tokens. Only servers on this machine are measured: loopback addresses, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

REQUEST_LIMIT_SECONDS = 900.0
# Byte tokens only: special tokens come before them, fillers after.
FIRST_PROMPT_TOKEN, LAST_PROMPT_TOKEN = 4, 259


class BenchmarkError(RuntimeError):
    """A server answered with an error, or with other tokens than asked for: its figures would mean nothing."""


@dataclass(frozen=True)
class Timing:
    """One request, in seconds. `time_per_token` is between tokens: (last event - first event) / (tokens - 1)."""

    num_tokens: int
    time_to_first_token: float
    time_per_token: float
    duration: float


@dataclass(frozen=True)
class Sample:
    """One repetition of a workload: medians over its requests, and the throughput of all of them together."""

    tokens_per_second: float
    time_per_token: float
    time_to_first_token: float
    requests: tuple[Timing, ...]


def check_loopback(url: str) -> None:
    if urlsplit(url).hostname != "127.0.0.1":
        raise ValueError(f"{url}: only servers on 127.0.0.1 are measured")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every `data:` line up to [DONE]."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            raise BenchmarkError(f"{response.url}: {event['error']}")
        yield event


async def complete(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], num_tokens: int) -> Timing:
    """Stream one greedy completion of exactly `num_tokens` tokens. Raises BenchmarkError on any other outcome."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    arrivals: list[float] = []  # of events that carry tokens; one event may carry several
    num_received = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise BenchmarkError(f"{url}: HTTP {response.status}: {(await response.text())[:300]}")
        async for event in _events(response):
            if event.get("choices"):
                arrivals.append(time.perf_counter())
            if event.get("usage"):
                num_received = event["usage"]["completion_tokens"]
    if num_received != num_tokens or not arrivals:
        raise BenchmarkError(f"{url}: {num_received} tokens in {len(arrivals)} events, {num_tokens} were asked for")
    return Timing(
        num_tokens=num_tokens,
        time_to_first_token=arrivals[0] - start,
        time_per_token=(arrivals[-1] - arrivals[0]) / max(1, num_tokens - 1),
        duration=arrivals[-1] - start,
    )


async def _run(url: str, model: str, concurrency: int, prompts: list[list[int]], num_tokens: int) -> Sample:
    """Closed loop: `concurrency` workers, each sends its next prompt as soon as its last answer is complete."""
    waiting = list(reversed(prompts))
    timings: list[Timing] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_SECONDS)
    # No limit on connections: the workers are the limit.
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker() -> None:
            while waiting:
                timings.append(await complete(session, url, model, waiting.pop(), num_tokens))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        wall = time.perf_counter() - start
    return Sample(
        tokens_per_second=sum(timing.num_tokens for timing in timings) / wall,
        time_per_token=statistics.median(timing.time_per_token for timing in timings),
        time_to_first_token=statistics.median(timing.time_to_first_token for timing in timings),
        requests=tuple(timings),
    )


def random_prompts(count: int, num_tokens: int, seed: str) -> list[list[int]]:
    """Prompts of `num_tokens` random byte tokens; the same seed gives the same prompts to every server."""
    source = random.Random(seed)
    return [[source.randint(FIRST_PROMPT_TOKEN, LAST_PROMPT_TOKEN) for _ in range(num_tokens)] for _ in range(count)]


def measure(
    url: str,
    model: str,
    *,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: str,
) -> Sample:
    """Run `num_requests` requests, `concurrency` at a time, and return their timings.

    Raises BenchmarkError if a request fails: a benchmark does not retry.
    """
    check_loopback(url)
    prompts = random_prompts(num_requests, prompt_tokens, seed)
    try:
        return asyncio.run(_run(url, model, concurrency, prompts, output_tokens))
    except* (BenchmarkError, aiohttp.ClientError, TimeoutError) as group:
        raise BenchmarkError(f"{url}: {group.exceptions[0]!r}") from group
