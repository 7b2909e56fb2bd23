"""What clients see when a machine loses its power, or hangs: OpenAI's own client asks all the time.

A machine of engines: requests that have no token yet succeed on the groups of another machine; answers that have begun
end with an explicit error. This takes the router seconds, not the minute that Kubernetes needs to miss a node.
A machine of a router: its clients hear nothing any more, and are served by the other router once they ask again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from e2e.support.busy import one_group_per_node, pods, routers, serving, under_traffic, wait_settled
from e2e.support.cluster import REPOSITORY, Cluster
from e2e.support.progress import wait_for
from e2e.support.traffic import PATIENT, Outcome, Patience, Question

pytestmark = [pytest.mark.long, pytest.mark.alone]

ENGINES_ON, ROUTER_ON = "node3", "node1"  # the victims: one group of each role; one router and no engine
# Longer than clients are patient: what waited for the machine to come back would count as hung.
AWAY_SECONDS = PATIENT.silence_seconds + 10
ASKING_AGAIN = Patience(silence_seconds=30.0, num_retries=4)  # together longer than Kubernetes needs to miss a node


def power(action: str, node: str) -> None:
    """kill, start, freeze or thaw a node."""
    command = [sys.executable, str(REPOSITORY / "e2e" / "cluster" / "cluster.py"), "node", action, node]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=180)


def wait_node(cluster: Cluster, node: str, is_ready: bool) -> None:
    def probe() -> bool:
        status = json.loads(cluster.kubectl("get", "node", node, "-o", "json"))["status"]
        return any(c["type"] == "Ready" and (c["status"] == "True") == is_ready for c in status["conditions"])

    wait_for(f"{node} to be {'back' if is_ready else 'missed'}", probe, timeout_seconds=120)


def leg_failures(cluster: Cluster, namespace: str) -> float:
    """How often the routers have given up on a group that had taken a request, and begun anew."""
    addresses = [pod["status"]["podIP"] for pod in routers(cluster, namespace)]
    texts = [urllib.request.urlopen(f"http://{a}:8000/metrics", timeout=30).read().decode() for a in addresses]
    return sum(
        float(n) for text in texts for n in re.findall(r"^headrace_router_leg_failures_total{.*} (.*)$", text, re.M)
    )


@pytest.fixture(scope="module")
def url(cluster: Cluster, namespace: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if not cluster.is_one_machine:
        pytest.skip("only the nodes of the one-machine cluster can be switched off")
    deployment = one_group_per_node(ROUTER_ON, ENGINES_ON)
    with serving(cluster, namespace, deployment, lambda: request.getfixturevalue("questions")) as found:
        yield found


@pytest.fixture
def lose(cluster: Cluster, namespace: str) -> Iterator[Callable[[str, str, str], None]]:
    """Takes a node away, until Kubernetes has missed it and nobody may wait any more, and back. It is as it was
    afterwards, whatever happened."""
    lost: list[str] = []

    def there_and_back(node: str, action: str, remedy: str) -> None:
        lost.append(node)
        power(action, node)
        began = time.monotonic()
        wait_node(cluster, node, is_ready=False)
        time.sleep(max(0.0, began + AWAY_SECONDS - time.monotonic()))
        power(remedy, node)
        wait_node(cluster, node, is_ready=True)
        wait_settled(cluster, namespace, 2)

    yield there_and_back
    for node in lost:
        power("thaw", node)
        power("start", node)
        wait_node(cluster, node, is_ready=True)


@pytest.mark.parametrize(("action", "remedy"), [("kill", "start"), ("freeze", "thaw")])
def test_a_lost_machine_costs_only_answers_that_have_begun(
    cluster: Cluster,
    namespace: str,
    url: str,
    questions: list[Question],
    lose: Callable[[str, str, str], None],
    action: str,
    remedy: str,
) -> None:
    lost = [pod for pod in pods(cluster, namespace) if pod["spec"]["nodeName"] == ENGINES_ON]
    assert sorted(pod["metadata"]["labels"]["headrace.dev/role"] for pod in lost) == ["decode", "prefill"]
    before = leg_failures(cluster, namespace)
    report = under_traffic(url, questions, lambda: lose(ENGINES_ON, action, remedy))
    assert report.count(Outcome.BROKEN) or leg_failures(cluster, namespace) > before  # it was missed
    assert report.count(Outcome.RIGHT, Outcome.BROKEN) == len(report.answers), str(report)


def test_a_router_that_hangs_with_its_machine_costs_no_client_that_asks_again(
    cluster: Cluster, namespace: str, url: str, questions: list[Question], lose: Callable[[str, str, str], None]
) -> None:
    assert ROUTER_ON in {pod["spec"]["nodeName"] for pod in routers(cluster, namespace)}
    assert ROUTER_ON not in {pod["spec"]["nodeName"] for pod in pods(cluster, namespace)}
    report = under_traffic(url, questions, lambda: lose(ROUTER_ON, "freeze", "thaw"), ASKING_AGAIN)
    cut = [answer for answer in report.answers if answer.outcome is not Outcome.RIGHT]
    assert all(answer.outcome in (Outcome.LOST, Outcome.HUNG) and answer.num_tokens for answer in cut), str(report)
