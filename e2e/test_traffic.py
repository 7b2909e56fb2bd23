"""What clients see while groups are rolled, scaled, drained and killed: OpenAI's own client asks all the time.

Planned changes cost no request. A kill costs the answers that have begun, and says so in each; all others are given by
other groups. No token is ever wrong, no request ever hangs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.support.busy import LABEL, gather_routers, manifest, pods, resize, serving, under_traffic, wait_settled
from e2e.support.cluster import Cluster
from e2e.support.traffic import Outcome, Question, Report

ROUND_2 = {"template": {"annotations": {"example.org/round": "2"}}}


@pytest.fixture(scope="module")
def url(cluster: Cluster, namespace: str, request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(cluster, namespace, manifest(), lambda: request.getfixturevalue("questions")) as found:
        yield found


def assert_all_right(report: Report) -> None:
    assert report.answers
    assert report.count(Outcome.RIGHT) == len(report.answers), str(report)


def test_rolling_both_roles_costs_no_request(
    cluster: Cluster, namespace: str, url: str, questions: list[Question]
) -> None:
    old = {pod["metadata"]["uid"] for pod in pods(cluster, namespace)}

    def roll() -> None:
        cluster.apply(manifest(prefill=ROUND_2, decode=ROUND_2), namespace)
        wait_settled(cluster, namespace, 2, old)

    assert_all_right(under_traffic(url, questions, roll))


@pytest.mark.long
def test_scaling_both_roles_costs_no_request(
    cluster: Cluster, namespace: str, url: str, questions: list[Question]
) -> None:
    def scale() -> None:
        for num_groups in (1, 2):
            resize(cluster, namespace, num_groups)
            wait_settled(cluster, namespace, num_groups)

    assert_all_right(under_traffic(url, questions, scale))


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        pytest.param("prefill", [Outcome.RIGHT], marks=pytest.mark.long),
        ("decode", [Outcome.RIGHT, Outcome.BROKEN]),
    ],
)
def test_a_killed_pod_costs_only_answers_that_have_begun(
    cluster: Cluster, namespace: str, url: str, questions: list[Question], role: str, allowed: list[Outcome]
) -> None:
    victim = pods(cluster, namespace, role)[0]["metadata"]

    def kill() -> None:
        cluster.kubectl("delete", "pod", victim["name"], "-n", namespace, "--grace-period=0", "--force")
        wait_settled(cluster, namespace, 2, {victim["uid"]})

    report = under_traffic(url, questions, kill)
    assert report.count(*allowed) == len(report.answers), str(report)


@pytest.mark.long
@pytest.mark.alone
def test_draining_a_node_costs_no_request(
    cluster: Cluster, namespace: str, url: str, questions: list[Question]
) -> None:
    """The node of a decode group, with whatever else of the deployment is on it, and of both routers."""
    node = pods(cluster, namespace, "decode")[0]["spec"]["nodeName"]
    gather_routers(cluster, namespace, node)
    moved = {pod["metadata"]["uid"] for pod in pods(cluster, namespace) if pod["spec"]["nodeName"] == node}

    def drain() -> None:
        options = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s"]
        cluster.kubectl("drain", node, *options, f"--pod-selector={LABEL}", timeout_seconds=330)
        wait_settled(cluster, namespace, 2, moved)

    try:
        assert_all_right(under_traffic(url, questions, drain))
    finally:
        cluster.kubectl("uncordon", node)
