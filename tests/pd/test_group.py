"""A group of several ranks on several pods: the same tokens, no rank left waiting, all end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.pd.engines import (
    START_SECONDS,
    TIMEOUT,
    Engine,
    Events,
    completion,
    generate,
    group,
    prompts_of,
    running,
)
from tests.pd.reference import Reference

pytestmark = pytest.mark.slow  # real processes

LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 24, 33, 60]
END_SECONDS = 20


@pytest.fixture(scope="module")
def dep2() -> Iterator[Engine]:
    pods = group(2, "--role", "unified", "--max-batch-tokens", "40")
    with running(*pods):
        yield pods[0]


def test_experts_sharded_over_two_pods_give_the_same_tokens(dep2: Engine, reference: Reference) -> None:
    for prompt in prompts_of(LENGTHS, first=20):  # one at a time: the other rank idles along
        assert generate(dep2.url, prompt) == reference.tokens(prompt, 8), len(prompt)


def test_uneven_load_over_both_ranks(dep2: Engine, reference: Reference) -> None:
    prompts = prompts_of([3 + 7 * i for i in range(9)], first=60)
    with ThreadPoolExecutor(9) as pool:
        sharded = list(pool.map(lambda prompt: generate(dep2.url, prompt, 3 + len(prompt) % 5), prompts))
    assert sharded == [reference.tokens(prompt, 3 + len(prompt) % 5) for prompt in prompts]
    dep2.wait_all_free()
    assert all(rank["generation_tokens_total"] > 0 for rank in dep2.state()["ranks"])


def test_an_idle_group_answers_at_once(dep2: Engine) -> None:
    time.sleep(2.5)  # the group beats once a second now
    began = time.monotonic()
    generate(dep2.url, [20, 21], 1)
    first = time.monotonic() - began
    began = time.monotonic()
    generate(dep2.url, [20, 22], 1)
    assert first < time.monotonic() - began + 0.5


@pytest.mark.parametrize(
    "victim",
    [
        "leader's rank",
        "follower's rank",
        "leader",
        "follower",
    ],
)
def test_whatever_of_a_group_dies_all_of_it_ends_within_seconds(victim: str) -> None:
    leader, follower = pods = group(2, "--role", "unified")
    with running(*pods):
        ranks = [*leader.rank_pids(), *follower.rank_pids()]
        assert len(ranks) == 2
        pid = {
            "leader's rank": ranks[0],
            "follower's rank": ranks[1],
            "leader": leader.process.pid,
            "follower": follower.process.pid,
        }[victim]
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(
                httpx.post, f"{leader.url}/v1/completions", json=completion([20, 21], 4000), timeout=TIMEOUT
            )
            deadline = time.monotonic() + 60
            while not sum(rank["generation_tokens_total"] for rank in leader.state()["ranks"]):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            for pod in pods:
                assert pod.process.wait(END_SECONDS) != 0
            _assert_failed(request)
        assert not [rank for rank in ranks if _is_alive(rank)]


def test_sigterm_finishes_what_is_in_flight_then_ends_with_0() -> None:
    engine = Engine("--role", "unified", "--data", "2", "--expert-parallel")
    url, num_tokens = f"{engine.url}/v1/completions", 200  # seconds, on an idle machine
    with running(engine):
        body = completion([20, 21], num_tokens, stream=True)
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as response:
            events = iter(Events(response))
            began = [next(events), next(events)]
            engine.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{engine.url}/ready", timeout=TIMEOUT).status_code == 200:
                time.sleep(0.01)
            refused = httpx.post(url, json=completion([20]), timeout=TIMEOUT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            data = [data for _, data in (*began, *events)]
        assert data.pop() == "[DONE]"
        assert sum(len(json.loads(each)["choices"][0].get("token_ids", [])) for each in data) == num_tokens
        assert engine.process.wait(END_SECONDS) == 0, engine.log()


def test_told_to_end_before_it_has_started_it_ends_with_0_and_leaves_no_file() -> None:
    engine = Engine("--role", "unified")
    scratch = Path(engine.scratch)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not list(scratch.glob("headrace-tiny-*")):
            assert time.monotonic() < deadline
            assert engine.process.poll() is None, engine.log()
            time.sleep(0.005)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(START_SECONDS) == 0, engine.log()
        assert list(scratch.iterdir()) == []
    finally:
        engine.stop()


def test_a_taken_port_ends_it_and_the_log_says_which() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        engines = [Engine("--role", "unified", port=port), Engine("--role", "unified", control=port)]
        try:
            for engine in engines:
                assert engine.process.wait(START_SECONDS) == 1, engine.log()
                assert str(port) in engine.log()
        finally:
            for engine in engines:
                engine.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "unified", "--data", "3", "--data-local", "2"), "multiple of --data-local"),
        (("--role", "unified", "--block-size", "7"), "needs a multiple of 8"),
        (("--role", "unified", "--num-blocks", "3"), "hold no request of --max-model-len"),
        (("--role", "unified", "--max-model-len", "99999"), "this model ends at"),
    ],
)
def test_bad_flags_end_with_2_and_say_what_to_do(flags: tuple[str, ...], message: str) -> None:
    engine = Engine(*flags)
    try:
        assert engine.process.wait(START_SECONDS) == 2, engine.log()
        assert message in engine.log()
    finally:
        engine.stop()


def _assert_failed(request: object) -> None:
    """The client of a dead group gets an error: a clear one, or a broken connection."""
    from concurrent.futures import Future

    assert isinstance(request, Future)
    error = request.exception()
    if error is None:
        assert request.result().status_code == 503
    else:
        assert isinstance(error, httpx.TransportError)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
