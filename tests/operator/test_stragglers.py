"""Pods that outlive their deployment: which they are, and when they are removed by force."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.operator.worlds import UID, FakeCluster, ready_status, stored

from headrace_operator.groups import OVERDUE_SECONDS
from headrace_operator.plans import Deletion
from headrace_operator.render.nodes import leaving_after
from headrace_operator.stragglers import PATIENCE_SECONDS, overdue, stragglers, suspects
from headrace_operator.times import epoch_seconds

DELETED = "2026-01-01T00:10:00Z"  # its grace included
T = epoch_seconds(DELETED)
GRACE_SECONDS = 100
LOSS_SECONDS = 60
CLUSTER = FakeCluster()
CLUSTER.settle(stored())


def pod(deletion: str | None = DELETED) -> dict[str, Any]:
    """A prefill pod on node-a, bound for so long as `LOSS_SECONDS` to a node that is silent."""
    body = copy.deepcopy(next(body for name, body in CLUSTER.pods().items() if "-prefill-" in name))
    body = leaving_after(body, LOSS_SECONDS)
    body["spec"]["nodeName"] = "node-a"
    body["status"] = ready_status()
    if deletion:
        body["metadata"] |= {"deletionTimestamp": deletion, "deletionGracePeriodSeconds": GRACE_SECONDS}
    return body


def misnamed() -> dict[str, Any]:
    body = pod()
    body["metadata"]["name"] = "debug"
    return body


def orphan() -> dict[str, Any]:
    body = pod()
    del body["metadata"]["ownerReferences"]
    return body


@pytest.mark.parametrize(
    ("body", "uid", "is_straggler"),
    [
        (pod(), UID, False),
        (pod(), "", True),
        (pod(), "of-another-life", True),
        (pod(deletion=None), "", False),
        (misnamed(), UID, True),
        (orphan(), "", False),
    ],
    ids=[
        "a group's is the group's business",
        "its deployment goes or is gone",
        "a successor has its name",
        "one that runs is garbage collection's",
        "one that someone made in its name",
        "nobody's is left to whoever orphaned it",
    ],
)
def test_which_pods_are_stragglers(body: dict[str, Any], uid: str, is_straggler: bool) -> None:
    names = [found.pod.name for found in stragglers("demo", uid, [body])]
    assert names == ([body["metadata"]["name"]] if is_straggler else [])


@pytest.mark.parametrize(
    ("silent", "now", "is_removed", "wait"),
    [
        ({}, T, False, OVERDUE_SECONDS),
        ({}, T + OVERDUE_SECONDS, True, None),
        ({"node-a": T - 100}, T - 50, False, 10),
        ({"node-a": T - 100}, T - 40, True, None),
        ({"node-b": T - 100}, T - 40, False, 40 + OVERDUE_SECONDS),
    ],
    ids=["in its grace", "long past it", "its node is silent", "for as long as it may", "another node is"],
)
def test_they_are_removed_once_they_count_as_gone(
    silent: dict[str, float], now: float, is_removed: bool, wait: float | None
) -> None:
    body = pod()
    removed = [Deletion(body["metadata"]["name"], body["metadata"]["uid"], 0)]
    found = stragglers("demo", "", [body])
    assert suspects(found, now) == ["node-a"]
    assert overdue(found, silent, now) == (removed if is_removed else [], wait)


def test_one_that_may_stay_for_ever_is_removed_when_it_overstays_its_deletion() -> None:
    body = pod()
    body["spec"]["tolerations"] = [{"operator": "Exists"}]
    gone, wait = overdue(stragglers("demo", "", [body]), {"node-a": T - 10_000}, T)
    assert (gone, wait) == ([], OVERDUE_SECONDS)


def test_a_pod_that_was_just_told_to_go_is_no_reason_to_ask_for_its_node() -> None:
    found = stragglers("demo", "", [pod()])
    told = T - GRACE_SECONDS
    assert suspects(found, told + PATIENCE_SECONDS - 1) == []
    assert overdue(found, {}, told + PATIENCE_SECONDS - 1) == ([], 1)
    assert suspects(found, told + PATIENCE_SECONDS) == ["node-a"]
