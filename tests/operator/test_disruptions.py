"""Disruption budgets: which role has one, what it leaves, the router's, and what the status says of those without."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_drain import in_service
from tests.operator.test_reconcile import KEY, FakeServer, reconciler
from tests.operator.worlds import FakeCluster, pod_status, stored

from headrace_operator import names
from headrace_operator.api_status import Condition

PAIR = {"parallelism": {"data": 2, "dataLocal": 1, "expert": True}}


def roles(num_prefill: int, num_decode: int, num_routers: int = 2) -> dict[str, Any]:
    """Prefill groups of one pod, decode groups of two."""
    decode = {"name": "decode", "replicas": num_decode, **PAIR}
    return {
        "spec.roles": [{"name": "prefill", "replicas": num_prefill}, decode],
        "spec.router": {"replicas": num_routers},
    }


def budgets(cluster: FakeCluster) -> dict[str, int]:
    """minAvailable by role."""
    return {
        body["metadata"]["labels"][names.LABEL_ROLE]: body["spec"]["minAvailable"]
        for (kind, _), body in cluster.objects.items()
        if kind == "PodDisruptionBudget" and names.LABEL_ROLE in body["metadata"]["labels"]
    }


def protected(cluster: FakeCluster) -> Condition:
    return next(c for c in cluster.status.conditions if c.type == names.PROTECTED)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "expected", "reason"),
    [
        (3, 2, {"prefill": 2, "decode": 3}, names.REASON_BUDGETED),
        (8, 1, {"prefill": 7}, names.REASON_SINGLE_GROUP),
        (1, 1, {}, names.REASON_SINGLE_GROUP),
        (2, 0, {"prefill": 1}, names.REASON_BUDGETED),
    ],
)
def test_one_pod_of_a_role_may_go_and_the_only_group_is_not_guarded(
    num_prefill: int, num_decode: int, expected: dict[str, int], reason: str
) -> None:
    cluster = FakeCluster()
    cluster.settle(stored(roles(num_prefill, num_decode)))
    assert budgets(cluster) == expected
    assert protected(cluster).reason == reason
    assert (protected(cluster).status == "True") == (reason == names.REASON_BUDGETED)


def test_the_budget_follows_the_number_of_groups_and_goes_with_the_second_last() -> None:
    cluster = FakeCluster()
    for num_decode, left in ((4, 7), (3, 5), (1, None)):
        cluster.settle(stored(roles(1, num_decode)))
        assert budgets(cluster).get("decode") == left


@pytest.mark.parametrize(
    ("num_routers", "limit", "reason"),
    [
        (3, 1, names.REASON_BUDGETED),
        (2, 1, names.REASON_BUDGETED),
        (1, None, names.REASON_SINGLE_ROUTER),
        (0, None, names.REASON_BUDGETED),
    ],
)
def test_one_router_may_go_and_the_only_one_is_not_guarded(num_routers: int, limit: int | None, reason: str) -> None:
    cluster = FakeCluster()
    for before in (2, num_routers):  # a budget goes with the second router
        cluster.settle(stored(roles(2, 2, before)))
    budget = cluster.objects.get(("PodDisruptionBudget", names.router_name("demo")))
    assert (budget["spec"]["maxUnavailable"] if budget else None) == limit
    assert protected(cluster).reason == reason


def test_the_routers_budget_counts_the_pods_of_the_router_and_no_other() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(roles(1, 1)))
    selector = cluster.objects["PodDisruptionBudget", names.router_name("demo")]["spec"]["selector"]
    assert selector == cluster.objects["Deployment", names.router_name("demo")]["spec"]["selector"]


def test_a_group_that_was_given_up_does_not_block_drains_for_ever() -> None:
    changes = {**roles(1, 3), "spec.restartPolicy": {"maxRestarts": 0}}
    cluster = FakeCluster()
    cluster.settle(stored(changes))
    first = sorted(name for name in cluster.pods() if "-decode-" in name)[0]
    cluster.objects["Pod", first]["status"] = pod_status("Failed", state={"terminated": {"exitCode": 1}})
    for now in (1.0, 2.0):
        cluster.run(stored(changes), now)
    assert budgets(cluster)["decode"] == 2 * 2 - 1


async def test_an_evicted_pod_moves_its_whole_group_once_and_no_other() -> None:
    server = FakeServer(roles(1, 2))
    subject = reconciler(server)
    for _ in range(5):
        in_service(server)
        await subject.reconcile(KEY)
    before = {name: pod["metadata"]["uid"] for name, pod in server.world.pods().items()}
    group = sorted(name for name in before if "-decode-" in name)[:2]
    server.world.pods()[group[1]]["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"  # as an eviction does
    await subject.reconcile(KEY)
    del server.world.objects["Pod", group[1]]
    for _ in range(5):
        await subject.reconcile(KEY)
        in_service(server)
    after = {name: pod["metadata"]["uid"] for name, pod in server.world.pods().items()}
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == set(group)
    assert server.raw is not None
    assert all(rebuild["failures"] == 0 for rebuild in server.raw["status"]["rebuilds"])
    assert server.calls.count("delete Pod") == 1
