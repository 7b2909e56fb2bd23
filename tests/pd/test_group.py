"""A group of several ranks on several pods: the same tokens, no rank left waiting, all end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.pd.engines import TIMEOUT, Engine, completion, generate, group, pd_tokens, prompts_of, running

LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 60]
END_SECONDS = 20


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    engine = Engine("--role", "unified")
    with running(engine):
        yield engine


@pytest.fixture(scope="module")
def dep2() -> Iterator[Engine]:
    pods = group(2, "--role", "unified", "--max-batch-tokens", "40")
    with running(*pods):
        yield pods[0]


def test_experts_sharded_over_two_pods_give_the_same_tokens(alone: Engine, dep2: Engine) -> None:
    for prompt in prompts_of(LENGTHS, first=20):  # one at a time: the other rank idles along
        assert generate(dep2.url, prompt) == generate(alone.url, prompt), len(prompt)


def test_uneven_load_over_both_ranks(alone: Engine, dep2: Engine) -> None:
    prompts = prompts_of([3 + 7 * i for i in range(9)], first=60)
    with ThreadPoolExecutor(9) as pool:
        sharded = list(pool.map(lambda prompt: generate(dep2.url, prompt, 3 + len(prompt) % 5), prompts))
    assert sharded == [generate(alone.url, prompt, 3 + len(prompt) % 5) for prompt in prompts]
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


@pytest.mark.slow
def test_prefill_alone_decode_as_two_sharded_ranks(alone: Engine) -> None:
    pods = group(2, "--role", "decode")
    prefill = Engine("--role", "prefill", "--max-batch-tokens", "24")
    with running(*pods, prefill):
        prompts = prompts_of(LENGTHS, first=120)
        with ThreadPoolExecutor(4) as pool:
            apart = list(pool.map(lambda prompt: pd_tokens(prefill.url, pods[0].url, prompt), prompts))
        assert apart == [generate(alone.url, prompt) for prompt in prompts]
        pods[0].wait_all_free()


@pytest.mark.slow
def test_prefill_as_two_sharded_ranks_decode_as_two_independent_ones(alone: Engine) -> None:
    decode = Engine("--role", "decode", "--data", "2")
    prefill = Engine("--role", "prefill", "--data", "2", "--expert-parallel")
    with running(decode, prefill):
        prompts = prompts_of(LENGTHS, first=140)
        with ThreadPoolExecutor(4) as pool:
            apart = list(pool.map(lambda prompt: pd_tokens(prefill.url, decode.url, prompt), prompts))
        assert apart == [generate(alone.url, prompt) for prompt in prompts]
        decode.wait_all_free()
        prefill.wait_all_free()


@pytest.mark.parametrize("victim", ["leader's rank", "follower's rank", "leader", "follower"])
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
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            for pod in pods:
                assert pod.process.wait(END_SECONDS) != 0
            _assert_failed(request)
        assert not [rank for rank in ranks if _is_alive(rank)]


def test_sigterm_finishes_what_is_in_flight_then_ends_with_0() -> None:
    engine = Engine("--role", "unified", "--data", "2", "--expert-parallel")
    with running(engine):
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(generate, engine.url, [20, 21], 60)
            time.sleep(0.5)
            engine.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            refused = httpx.post(f"{engine.url}/v1/completions", json=completion([20]), timeout=TIMEOUT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert httpx.get(f"{engine.url}/ready", timeout=TIMEOUT).status_code == 503
            assert len(request.result()) == 60
        assert engine.process.wait(END_SECONDS) == 0, engine.log()


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
        assert engine.process.wait(60) == 2, engine.log()
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
