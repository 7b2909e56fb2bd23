"""A 2P1D deployment (decode is DEP2 over two pods) serves, refuses, and survives the loss of pods."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster
from e2e.support.progress import wait_for
from e2e.support.reference import greedy_tokens

NAME = "tiny-2p1d"
MODEL = headrace.example(NAME)["spec"]["model"]["name"]
SETTLE_SECONDS = 3.0  # from a kill that the API server has taken until the containers are gone


@pytest.fixture(scope="module")
def router(cluster: Cluster, namespace: str) -> Iterator[str]:
    cluster.apply(headrace.example(NAME), namespace)
    headrace.wait_ready(cluster, NAME, namespace)
    with cluster.service_url(NAME, namespace=namespace) as url:
        headrace.wait_answer(f"{url}/v1/completions", completion([5, 6, 7], max_tokens=1))
        yield url


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [4 + (7 * index + 31 * salt + index * index) % 250 for index in range(length)]


def pods(cluster: Cluster, namespace: str, role: str) -> list[dict[str, Any]]:
    selector = f"headrace.dev/deployment={NAME},headrace.dev/role={role}"
    return [pod for pod in cluster.list("pods", selector, namespace) if not pod["metadata"].get("deletionTimestamp")]


def uids(found: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in found}


def state_of(cluster: Cluster, namespace: str, role: str) -> list[dict[str, Any]]:
    """/state of every leader of a role."""
    import json
    import urllib.request

    states = []
    for pod in pods(cluster, namespace, role):
        if pod["metadata"]["labels"]["headrace.dev/pod-index"] == "0":
            with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/state", timeout=10) as response:
                states.append(json.load(response))
    return states


def kill(cluster: Cluster, namespace: str, pod: dict[str, Any]) -> None:
    """As abrupt as the API allows: SIGKILL, no grace."""
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--grace-period=0", "--force")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 129, 200])
def test_greedy_tokens_equal_transformers(router: str, length: int) -> None:
    prompt = prompt_of(length)
    answer = headrace.wait_answer(f"{router}/v1/completions", completion(prompt))
    assert answer["choices"][0]["token_ids"] == greedy_tokens(prompt, 8, eos_token_id=-1)


def test_a_burst_of_different_prompts_is_answered_right(router: str) -> None:
    prompts = [prompt_of(5 + 9 * index, salt=index) for index in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: headrace.post(f"{router}/v1/completions", completion(p)), prompts))
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == greedy_tokens(prompt, 8, eos_token_id=-1)


def test_pods_of_the_decode_group_sit_on_different_nodes(cluster: Cluster, namespace: str, router: str) -> None:
    found = pods(cluster, namespace, "decode")
    assert len({pod["spec"]["nodeName"] for pod in found}) == len(found) == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (completion(prompt_of(100_000)), 400),
        ({**completion([5]), "model": "no-such-model"}, 404),
        (b'{"model": "', 400),
        (completion([5], max_tokens=-1), 400),
        (completion([10**9]), 400),
    ],
    ids=["prompt too long", "unknown model", "malformed JSON", "negative max_tokens", "token id out of range"],
)
def test_a_bad_request_is_refused_and_reserves_nothing(
    cluster: Cluster, namespace: str, router: str, body: Any, status: int
) -> None:
    answered, answer = headrace.post(f"{router}/v1/completions", body)
    assert answered == status
    assert set(answer["error"]) >= {"message", "type", "code", "param"}
    if cluster.is_one_machine:
        wait_for("every block to be free", lambda: all_blocks_free(cluster, namespace), timeout_seconds=20)


def all_blocks_free(cluster: Cluster, namespace: str) -> bool:
    states = state_of(cluster, namespace, "decode") + state_of(cluster, namespace, "prefill")
    return all(
        rank["num_running"] + rank["num_waiting"] + rank["num_waiting_for_kv"] + rank["num_pushing"] == 0
        and rank["num_quarantined_blocks"] == 0
        for state in states
        for rank in state["ranks"]
    )


@dataclass(frozen=True)
class Asked:
    began_at: float  # of the monotonic clock
    prompt: list[int]
    status: int  # 0: the connection broke
    answer: dict[str, Any]


def ask_until(stop: threading.Event, router: str, asked: list[Asked]) -> None:
    salt = 0
    while not stop.is_set():
        salt += 1
        prompt = prompt_of(40 + salt % 60, salt)
        began_at = time.monotonic()
        try:
            status, answer = headrace.post(f"{router}/v1/completions", completion(prompt, max_tokens=16), 90)
        except OSError as error:
            status, answer = 0, {"error": str(error)}
        asked.append(Asked(began_at, prompt, status, answer))


def asked_while(router: str, action: Callable[[], object], num_clients: int = 4) -> list[Asked]:
    """Keep clients asking while `action` runs and until some requests begun after it have ended; every request.

    Counted, not timed: on a busy machine a single request can take seconds.
    """
    stop = threading.Event()
    asked: list[Asked] = []
    clients = [threading.Thread(target=ask_until, args=(stop, router, asked)) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        wait_for("an answer to every client", lambda: len(asked) >= num_clients, timeout_seconds=120)
        action()
        acted_at = time.monotonic()
        wait_for(
            "answers to requests made after it had taken effect",
            lambda: sum(one.began_at > acted_at + SETTLE_SECONDS for one in asked) >= num_clients,
            timeout_seconds=120,
        )
    finally:
        stop.set()
        for client in clients:
            client.join(120)
    return asked


def assert_tokens_right(asked: list[Asked]) -> None:
    for one in asked:
        if one.status == 200:
            assert one.answer["choices"][0]["token_ids"] == greedy_tokens(one.prompt, 16, eos_token_id=-1)


def test_a_killed_prefill_pod_costs_no_request(cluster: Cluster, namespace: str, router: str) -> None:
    victim = pods(cluster, namespace, "prefill")[0]
    asked = asked_while(router, lambda: kill(cluster, namespace, victim))
    assert [(one.status, one.answer) for one in asked if one.status != 200] == []
    assert_tokens_right(asked)
    headrace.wait_ready(cluster, NAME, namespace)


def test_a_killed_decode_pod_gives_clear_errors_and_the_group_comes_back_as_one(
    cluster: Cluster, namespace: str, router: str
) -> None:
    headrace.wait_ready(cluster, NAME, namespace)
    before = pods(cluster, namespace, "decode")
    follower = next(pod for pod in before if pod["metadata"]["labels"]["headrace.dev/pod-index"] == "1")
    prefill_before = uids(pods(cluster, namespace, "prefill"))
    asked = asked_while(router, lambda: kill(cluster, namespace, follower))
    for one in asked:
        assert one.status == 200 or (one.status in (500, 502, 503) and one.answer["error"]["message"]), one
    assert_tokens_right(asked)
    wait_for(
        "a new decode group",
        lambda: (
            len(pods(cluster, namespace, "decode")) == 2 and not uids(pods(cluster, namespace, "decode")) & uids(before)
        ),
        timeout_seconds=180,
    )
    headrace.wait_ready(cluster, NAME, namespace)
    assert uids(pods(cluster, namespace, "prefill")) == prefill_before
    prompt = prompt_of(77)
    answer = headrace.wait_answer(f"{router}/v1/completions", completion(prompt))
    assert answer["choices"][0]["token_ids"] == greedy_tokens(prompt, 8, eos_token_id=-1)
