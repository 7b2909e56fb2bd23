"""scaling.mode Auto with real engines: load on one side moves a group there, and no request notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.support import headrace
from e2e.support.cluster import Cluster
from e2e.support.progress import wait_for

NAME = "tiny-auto"
# Three engines, of which prefill has one; what prefill is to keep cannot be kept with long prompts, all else can.
SCALING = {
    "mode": "Auto",
    "auto": {
        "gpuBudget": 3,
        "intervalSeconds": 1,
        "holdSeconds": 3,
        "cooldownSeconds": 30,
        "targets": {
            "firstTokenMilliseconds": 500,
            "interTokenMilliseconds": 60_000,
            "kvUsePercent": 100,
            "requestsPerRank": 64,
        },
    },
}
PROMPT_TOKENS = 3000
NUM_CLIENTS = 6


def deployment() -> dict[str, Any]:
    body = headrace.example(NAME)
    body["spec"]["scaling"] = SCALING
    body["spec"]["roles"] = [{"name": "prefill", "replicas": 1}, {"name": "decode", "replicas": 2}]
    return body


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    return dict((cluster.get(headrace.KIND, NAME, namespace) or {}).get("status") or {})


def counts(cluster: Cluster, namespace: str) -> dict[str, int]:
    """Groups of each role that the operator wants."""
    return {role["name"]: role["replicas"] for role in status(cluster, namespace).get("roles", ())}


@contextmanager
def long_prompts(url: str) -> Iterator[list[tuple[int, Any]]]:
    """Clients that ask for one token of ever new long prompts; the answers' statuses and bodies."""
    stop = threading.Event()
    answers: list[tuple[int, Any]] = []

    def ask(client: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = [4 + (7 * i + 31 * client + 17 * number + i * i) % 250 for i in range(PROMPT_TOKENS)]
            body = {"model": "tiny", "prompt": [client + 4, number % 250, *prompt], "max_tokens": 1, "temperature": 0}
            try:
                answers.append(headrace.post(f"{url}/v1/completions", body, 120))
            except OSError as error:
                answers.append((0, str(error)))

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield answers
    finally:
        stop.set()
        for client in clients:
            client.join(180)


@pytest.mark.long
def test_load_on_one_side_moves_a_group_there_and_costs_no_request(cluster: Cluster, namespace: str) -> None:
    cluster.apply(deployment(), namespace)
    headrace.wait_ready(cluster, NAME, namespace)
    assert counts(cluster, namespace) == {"prefill": 1, "decode": 2}
    with cluster.service_url(NAME, namespace=namespace) as url:
        headrace.wait_answer(f"{url}/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1})
        with long_prompts(url) as answers:
            moved = {"prefill": 2, "decode": 1}
            wait_for("a group to move to prefill", lambda: counts(cluster, namespace) == moved, timeout_seconds=180)
            headrace.wait_ready(cluster, NAME, namespace)
    assert {code for code, _ in answers} == {200}, [answer for answer in answers if answer[0] != 200][:3]
    auto = status(cluster, namespace)["autoscaling"]
    assert auto["lastMoveTo"] == "prefill"
    assert auto["lastMoveMessage"].startswith("prefill goes from 1 to 2 groups, decode from 2 to 1; prefill is at ")
    print(f"\n{auto['lastMoveMessage']}\n{len(answers)} requests, all answered")
    events = cluster.list("events", "", namespace)
    assert "Rebalanced" in {event["reason"] for event in events}
    # A quiet deployment keeps what it has.
    wait_for(
        "it to be balanced",
        lambda: status(cluster, namespace)["autoscaling"]["state"] == "Balanced",
        timeout_seconds=90,
    )
    assert counts(cluster, namespace) == moved
