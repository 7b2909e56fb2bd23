"""Nodes that go silent: who is asked for, when a pod counts as lost, and what its group does then."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.worlds import DEFAULTS, UID, FakeCluster, ready_status, stored

from headrace_operator import names
from headrace_operator.api_status import Condition
from headrace_operator.cluster import Refused
from headrace_operator.decide import Decision, decide
from headrace_operator.node_lookup import REFUSED_SECONDS, REMEMBER_SECONDS, NodeLookup
from headrace_operator.node_loss import GONE, silent_since, suspect_nodes, with_lost_pods
from headrace_operator.observe import observe
from headrace_operator.render.nodes import leaving_after
from headrace_operator.status import status_of
from headrace_operator.times import epoch_seconds
from headrace_operator.upkeep import BROKEN_GRACE_SECONDS

PAIR = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}
SINCE = "2026-01-01T00:00:00Z"
T = epoch_seconds(SINCE)
LOSS_SECONDS = 60
# As the controller that finds a node silent leaves a pod: unready, though its kubelet said that all was well.
SILENT_POD = {
    "phase": "Running",
    "conditions": [
        {"type": "Ready", "status": "False"},
        {"type": "ContainersReady", "status": "True"},
        {"type": names.GATE_SERVING, "status": "True"},
    ],
}


def node(ready: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": SINCE}]}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [(node("True"), None), (node("Unknown"), T), (node("False"), T), (None, 0.0), ({}, None)],
    ids=["ready", "silent", "says that it is not ready", "gone", "just registered"],
)
def test_since_when_a_node_is_silent(body: dict[str, Any] | None, expected: float | None) -> None:
    assert silent_since(body) == expected


def world() -> tuple[FakeCluster, str, str]:
    """A settled deployment with its two decode pods on node-a and node-b."""
    cluster = FakeCluster()
    cluster.settle(stored(PAIR))
    first, second = sorted(name for name in cluster.pods() if "-decode-" in name)
    cluster.pods()[first]["spec"]["nodeName"] = "node-a"
    cluster.pods()[second]["spec"]["nodeName"] = "node-b"
    return cluster, first, second


def step(cluster: FakeCluster, silent: dict[str, float], now: float) -> tuple[Decision, Condition]:
    """What is decided, and the condition Ready; nothing is carried out."""
    deployment = stored(PAIR)
    observed = observe("demo", UID, cluster.objects.values())
    observed = with_lost_pods(observed, silent, LOSS_SECONDS, now)
    decision = decide(deployment, observed, cluster.status, DEFAULTS, now)
    status = status_of(deployment, observed, decision, cluster.status, (), now)
    cluster.status = status
    return decision, next(c for c in status.conditions if c.type == names.READY)


@pytest.mark.parametrize(
    ("status", "deletion", "suspects"),
    [
        (ready_status(), None, []),
        (SILENT_POD, None, ["node-b"]),
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}, None, []),  # only starting
        (ready_status(), SINCE, ["node-b"]),
        ({"phase": "Failed"}, SINCE, []),
    ],
    ids=["well", "made unready from outside", "starting", "being deleted", "ended"],
)
def test_a_node_is_asked_for_only_while_one_of_its_pods_looks_lost(
    status: dict[str, Any], deletion: str | None, suspects: list[str]
) -> None:
    cluster, _, second = world()
    cluster.pods()[second]["status"] = status
    if deletion:
        cluster.pods()[second]["metadata"]["deletionTimestamp"] = deletion
    assert suspect_nodes(observe("demo", UID, cluster.objects.values())) == suspects


def test_a_group_waits_as_long_as_its_node_may_be_silent() -> None:
    cluster, _, second = world()
    cluster.pods()[second]["status"] = SILENT_POD
    decision, _ = step(cluster, {"node-b": T}, T + 20)
    assert decision.delete_pods == ()
    assert decision.wait_seconds == pytest.approx(LOSS_SECONDS - 20)


@pytest.mark.parametrize("deletion", [None, "2026-01-01T00:10:00Z"], ids=["running", "stuck in its deletion"])
def test_then_it_is_made_again_elsewhere_and_that_is_no_failure(deletion: str | None) -> None:
    cluster, first, second = world()
    cluster.pods()[second]["status"] = SILENT_POD
    if deletion:
        cluster.pods()[second]["metadata"]["deletionTimestamp"] = deletion
    decision, ready = step(cluster, {"node-b": T}, T + LOSS_SECONDS)
    grace = {deletion.pod_name: deletion.grace_seconds for deletion in decision.delete_pods}
    assert grace == {first: BROKEN_GRACE_SECONDS, second: 0}
    assert (ready.reason, "node node-b does not answer" in ready.message) == (names.REASON_NODE_LOST, True)
    assert [note.reason for note in decision.notes] == [names.REASON_NODE_LOST]
    (noted,) = cluster.status.rebuilds
    assert noted.failures == 0
    for name in (first, second):
        del cluster.objects["Pod", name]
    after, _ = step(cluster, {"node-b": T}, T + LOSS_SECONDS + 1)
    assert len([a for a in after.apply if a.body["kind"] == "Pod"]) == 2  # at once: there is nothing to wait for


def test_a_pod_that_only_drains_on_a_living_node_is_left_its_time() -> None:
    cluster, _, second = world()
    cluster.pods()[second]["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"
    decision, _ = step(cluster, {}, T + LOSS_SECONDS)
    assert second not in {deletion.pod_name for deletion in decision.delete_pods}


SILENT_KEYS = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], SILENT_KEYS),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], SILENT_KEYS),
        ([{"key": SILENT_KEYS[0], "operator": "Exists", "tolerationSeconds": 5}], SILENT_KEYS[1:]),
        ([{"key": SILENT_KEYS[0], "operator": "Exists", "effect": "NoSchedule"}], SILENT_KEYS),
        ([{"operator": "Exists"}], []),
    ],
)
def test_pods_leave_silent_nodes_unless_their_template_says_otherwise(given: list[Any], added: list[str]) -> None:
    pod = leaving_after({"spec": {"tolerations": given}}, LOSS_SECONDS)
    tolerations = pod["spec"]["tolerations"]
    assert tolerations[: len(given)] == given
    assert [t["key"] for t in tolerations[len(given) :]] == added
    assert all(t["tolerationSeconds"] == LOSS_SECONDS for t in tolerations[len(given) :])


class Nodes:
    """Stands in for the API server."""

    def __init__(self, refuse: bool = False) -> None:
        self.asked: list[str] = []
        self.refuse = refuse
        self.silent = {"silent"}
        self.num_lists = 0

    async def get_node(self, name: str) -> dict[str, Any] | None:
        self.asked.append(name)
        if self.refuse:
            raise Refused("get Node: forbidden")
        return None if name == "removed" else self._node(name)

    async def list_page(self, kind: str, token: str | None, *_: object) -> dict[str, Any]:
        """One node a page, so that those who look for any must look further."""
        assert kind == "Node"
        self.num_lists += token is None
        name = token or "silent"
        return {"metadata": {"continue": {"silent": "well"}.get(name)}, "items": [self._node(name)]}

    def _node(self, name: str) -> dict[str, Any]:
        return node("Unknown" if name in self.silent else "True")


async def test_a_node_is_asked_for_once_in_a_while() -> None:
    server, now = Nodes(), [T]
    lookup = NodeLookup(server, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        assert await lookup.silent(["silent", "well"]) == {"silent": T}
    assert server.asked == ["silent", "well"]
    now[0] += REMEMBER_SECONDS
    await lookup.silent(["silent"])
    assert server.asked == ["silent", "well", "silent"]


async def test_without_the_right_to_read_nodes_none_is_silent_and_nobody_keeps_asking() -> None:
    server, now = Nodes(refuse=True), [T]
    lookup = NodeLookup(server, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        assert await lookup.silent(["silent"]) == {}
    assert len(server.asked) == 1
    now[0] += REFUSED_SECONDS
    await lookup.silent(["silent"])
    assert len(server.asked) == 2


async def test_while_no_node_answers_none_is_lost_and_silence_counts_once_one_has() -> None:
    """As after an outage of the API server: every node has missed its heartbeats, and pods run on all of them."""
    server, now = Nodes(), [T + 100]
    server.silent.add("well")
    lookup = NodeLookup(server, lambda: now[0])  # type: ignore[arg-type]
    assert await lookup.silent(["silent", "removed"]) == {"silent": T + 100, "removed": GONE}
    now[0] += 50
    assert await lookup.silent(["silent"]) == {"silent": T + 150}
    server.silent.remove("well")
    now[0] += 50
    assert await lookup.silent(["silent"]) == {"silent": T + 150}
    assert server.num_lists == 3
    await lookup.silent(["silent"])
    assert server.num_lists == 3
