"""What the router adds to a direct call: `make bench-router` prints a table. Fake engines, real sockets and processes.

Per request: a whole answer that costs the engine nothing. Per token: each token carries the time at which the engine
wrote it, so that one stream's delay is known token by token (one clock for all processes of a machine).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web
from tests.router.fakes import PATH, FakeEngine, Wire

from headrace_engine.core import Role

NUM_TOKENS = 200
TOKEN_SECONDS = 0.01


class StampingEngine(FakeEngine):
    """Writes the time into every token."""

    async def _tokens(self, request: web.Request, stream: web.StreamResponse, fault: str) -> None:
        for _ in range(NUM_TOKENS):
            await asyncio.sleep(TOKEN_SECONDS)
            await stream.write(b'data: {"at": %.9f}\n\n' % time.monotonic())
        await stream.write(b"data: [DONE]\n\n")


async def serve_engines() -> None:
    """Runs until stopped; prints the URLs by role."""
    wire = Wire()
    engines = [StampingEngine(role, wire) for role in Role]
    for engine in engines:
        await engine.start()
    print(json.dumps({engine.role: engine.url for engine in engines}), flush=True)
    await asyncio.Event().wait()


async def request_seconds(http: aiohttp.ClientSession, base: str, num_requests: int) -> list[float]:
    """One whole request after another."""
    seconds = []
    for _ in range(num_requests):
        started_at = time.monotonic()
        async with http.post(base + PATH, data=b'{"prompt": "x"}') as response:
            await response.read()
            response.raise_for_status()
        seconds.append(time.monotonic() - started_at)
    return seconds


async def token_seconds(http: aiohttp.ClientSession, base: str, num_streams: int) -> list[float]:
    """Delay of every token of so many streams at once."""

    async def stream() -> list[float]:
        delays = []
        async with http.post(base + PATH, data=b'{"prompt": "x", "stream": true}') as response:
            while chunk := await response.content.readany():
                now = time.monotonic()
                events = chunk.split(b"\n\n")[:-1]
                delays += [now - json.loads(event[6:])["at"] for event in events if not event.endswith(b"[DONE]")]
        assert len(delays) == NUM_TOKENS
        return delays

    return [delay for delays in await asyncio.gather(*(stream() for _ in range(num_streams))) for delay in delays]


@contextmanager
def processes() -> Iterator[dict[str, tuple[str, int | None]]]:
    """Name of a way -> (URL, pid of its router)."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    def router(*flags: str) -> tuple[str, int]:
        process = start("-m", "headrace_engine.router.cli", "--host=127.0.0.1", "--port=0", *flags)
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on " in line:
                return line.split("listening on ")[1].strip(), process.pid
        raise SystemExit("the router has not started")

    try:
        engines = start(__file__, "--serve-engines")
        assert engines.stdout is not None
        urls = json.loads(engines.stdout.readline())
        yield {
            "direct": (urls["unified"], None),
            "router, unified": router(f"--static=unified={urls['unified']}"),
            "router, P/D": router(f"--static=decode={urls['decode']}", f"--static=prefill={urls['prefill']}"),
        }
    finally:
        for process in started:
            process.terminate()
            process.communicate()


def cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure() -> None:
    print(f"{'':18}{'request ms':>12}{'CPU us':>8}{'token ms, 1 stream':>20}{'100 streams':>13}{'CPU us/token':>14}")
    with processes() as ways:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.sleep(1.0)  # the routers' first probes
            for name, (base, pid) in ways.items():
                await request_seconds(http, base, 100)
                before = cpu_seconds(pid)
                requests = await request_seconds(http, base, 1000)
                request_cpu = (cpu_seconds(pid) - before) / 1000
                one = await token_seconds(http, base, 1)
                before = cpu_seconds(pid)
                many = await token_seconds(http, base, 100)
                token_cpu = (cpu_seconds(pid) - before) / len(many)
                print(
                    f"{name:18}{statistics.median(requests) * 1e3:12.3f}{request_cpu * 1e6:8.0f}"
                    f"{statistics.median(one) * 1e3:20.3f}{statistics.median(many) * 1e3:13.3f}{token_cpu * 1e6:14.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--serve-engines", action="store_true", help=argparse.SUPPRESS)
    uvloop.run(serve_engines() if flags.parse_args().serve_engines else measure())
