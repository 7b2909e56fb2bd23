"""Groups that fail: counted once each, made again later and later, given up at last, and tried again when asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.worlds import FakeCluster, pod_status, ready_status, stored

from headrace_operator import names
from headrace_operator.api_status import Condition, Rebuild
from headrace_operator.groups import GroupState, Pod, RestartRules
from headrace_operator.groups import Rebuild as Noted
from headrace_operator.restarts import (
    BAD_NODE_FAILURES,
    FAILURE_MEMORY_SECONDS,
    after_failure,
    backoff_seconds,
    bad_nodes,
    failure_message,
    memory_of,
)
from headrace_operator.retry import annotation_for, failed, wishes

PAIR = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}  # decode: a group of two pods
RULES = RestartRules()
LONG = 10_000.0


# --- the wait before the next try ---


@pytest.mark.parametrize("failures", range(1, 12))
def test_the_wait_doubles_up_to_the_cap_and_is_at_most_a_fifth_shorter(failures: int) -> None:
    rules = RestartRules(backoff_base_seconds=2, backoff_max_seconds=100)
    whole = min(100, 2 * 2 ** (failures - 1))
    assert 0.8 * whole <= backoff_seconds(failures, "decode/0", rules) <= whole


def test_groups_that_fail_together_come_back_apart_and_the_same_state_gives_the_same_wait() -> None:
    waits = [backoff_seconds(6, f"decode/{group}", RULES) for group in range(50)]
    assert len(set(waits)) == 50
    assert waits == [backoff_seconds(6, f"decode/{group}", RULES) for group in range(50)]
    assert backoff_seconds(6, "decode/0", RestartRules(seed="another")) != waits[0]


@settings(max_examples=50, deadline=None)
@given(failures=st.integers(0, 10**6), base=st.integers(1, 86400), cap=st.integers(1, 86400))
def test_no_wait_is_longer_than_the_cap(failures: int, base: int, cap: int) -> None:
    assert 0 <= backoff_seconds(failures, "x", RestartRules(5, base, cap)) <= cap


# --- what is remembered ---


def well(since: float) -> tuple[Pod, ...]:
    return (
        Pod("p0", "u0", 0, "Running", True, ready_since=0.0),
        Pod("p1", "u1", 1, "Running", True, ready_since=since),
    )


def test_failures_are_forgotten_once_all_pods_have_been_ready_for_long() -> None:
    noted = Noted(3, 0.0, "")
    early = memory_of(noted, GroupState.READY, well(since=LONG), LONG + FAILURE_MEMORY_SECONDS - 5)
    assert early.rebuild == noted
    assert early.wait_seconds == pytest.approx(5)
    assert memory_of(noted, GroupState.READY, well(since=LONG), LONG + FAILURE_MEMORY_SECONDS).rebuild is None


def test_a_group_that_takes_long_to_load_is_not_well_meanwhile() -> None:
    noted = Noted(3, 0.0, "")
    assert memory_of(noted, GroupState.FORMING, (), LONG).rebuild == noted
    assert after_failure(noted, (), 2, RULES, LONG).failures == 4


# --- who is to blame ---


def ended(index: int, at: float | None, node: str = "", **more: Any) -> Pod:
    return Pod(f"p{index}", f"u{index}", index, "Failed", finished_at=at, node=node, **more)


def test_the_pod_that_ended_first_is_quoted_with_its_node() -> None:
    pods = (ended(0, 20.0, "node-a"), ended(1, 10.0, "node-b"), Pod("p2", "u2", 2, "Running"))
    assert failure_message(pods, 3) == "pod p1 ended (Failed) on node node-b"


def test_a_node_is_bad_after_failures_in_a_row_whatever_happens_elsewhere() -> None:
    noted: Noted | None = None
    for node in ("node-a", "node-b", "node-a"):
        noted = after_failure(noted, (ended(0, 1.0, node),), 1, RULES, 0.0)
    assert BAD_NODE_FAILURES == 2
    assert bad_nodes(noted) == ("node-a",)


def test_a_pod_that_was_edited_says_nothing_of_its_node() -> None:
    noted = after_failure(None, (ended(0, 1.0, "node-a", is_edited=True),), 1, RULES, 0.0)
    assert noted.nodes == ()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40))
def test_few_nodes_are_remembered_and_the_last_always(nodes: list[int]) -> None:
    noted: Noted | None = None
    for number in nodes:
        noted = after_failure(noted, (ended(0, 1.0, f"node-{number}"),), 1, RULES, 0.0)
        assert noted.nodes[-1][0] == f"node-{number}"
        assert len(noted.nodes) <= 8


# --- a whole deployment ---


def settled(changes: dict[str, Any] | None = None) -> FakeCluster:
    cluster = FakeCluster()
    cluster.settle(stored({**PAIR, **(changes or {})}))
    return cluster


def decode_pods(cluster: FakeCluster) -> dict[str, str]:
    """uid by name."""
    return {name: body["metadata"]["uid"] for name, body in cluster.pods().items() if "-decode-" in name}


def rebuild(cluster: FakeCluster) -> Rebuild:
    (noted,) = cluster.status.rebuilds
    return noted


def condition(cluster: FakeCluster, kind: str) -> Condition:
    return next(c for c in cluster.status.conditions if c.type == kind)


def end_of(reason: str, code: int = 1, **more: Any) -> dict[str, Any]:
    return pod_status("Failed", state={"terminated": {"exitCode": code, "reason": reason, **more}})


RESTARTED = {
    **ready_status(),
    "containerStatuses": [
        {
            "name": names.CONTAINER_ENGINE,
            "restartCount": 1,
            "state": {"running": {}},
            "lastState": {"terminated": {"exitCode": 9, "reason": "Error", "message": "first life"}},
        }
    ],
}
# What a kubelet or a controller leaves behind, and what the status must say of it.
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "the engine crashed": (end_of("Error", message="Traceback: no memory"), "exited with code 1 (Error)"),
    "out of memory": (end_of("OOMKilled", 137), "exited with code 137 (OOMKilled)"),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
        "ended: Evicted: The node was low on resource: memory.",
    ),
    "refused by the kubelet": (
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no devices"},
        "ended: UnexpectedAdmissionError: no devices",
    ),
    "its node shut down": (
        {"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to node shutdown."},
        "ended: Terminated",
    ),
    "ended without a reason": (pod_status("Succeeded", state={"terminated": {"exitCode": 0}}), "exited with code 0"),
    "ended beside a sidecar": (
        {
            "phase": "Running",
            "containerStatuses": [
                {"name": "logs", "state": {"running": {}}},
                {"name": names.CONTAINER_ENGINE, "state": {"terminated": {"exitCode": 3, "reason": "Error"}}},
            ],
        },
        "exited with code 3",
    ),
    "restarted in place": (RESTARTED, "exited with code 9 (Error)"),
}


@pytest.mark.parametrize("what", ENDS)
def test_whatever_ended_a_pod_while_nobody_looked_restarts_its_group_once_and_no_other(what: str) -> None:
    status, words = ENDS[what]
    cluster = settled()
    before, others = decode_pods(cluster), {n for n in cluster.pods() if "-prefill-" in n}
    cluster.objects["Pod", sorted(before)[1]]["status"] = status
    first = cluster.run(stored(PAIR), LONG)  # the operator's first look after it was down
    assert {deletion.uid for deletion in first.delete_pods} == set(before.values())
    assert words in rebuild(cluster).message
    for step in range(1, 8):
        cluster.run(stored(PAIR), LONG + step)
    after = decode_pods(cluster)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert rebuild(cluster).failures == 1
    assert others <= cluster.pods().keys()


def test_a_pod_that_is_lost_while_its_group_restarts_is_no_second_failure() -> None:
    cluster = settled()
    lost, other = sorted(decode_pods(cluster))
    cluster.objects["Pod", lost]["status"] = end_of("Error")
    decision = cluster.decide(stored(PAIR), LONG)
    assert len(decision.delete_pods) == 2
    for name in (lost, other):
        cluster.objects["Pod", name]["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"
    cluster.objects["Pod", other]["status"] = end_of("Error")
    second = cluster.decide(stored(PAIR), LONG)
    assert [note for note in second.notes if note.reason == "GroupFailed"] == []


def fail_until_given_up(cluster: FakeCluster, wanted: Any, now: float = LONG) -> float:
    """Let the first decode pod crash whenever it exists; returns the time when nothing more is done."""
    for _ in range(20):
        for name in sorted(decode_pods(cluster))[:1]:
            cluster.objects["Pod", name]["status"] = end_of("Error", message="last words")
        before = decode_pods(cluster)
        cluster.run(wanted, now)
        if cluster.status.rebuilds and rebuild(cluster).given_up and decode_pods(cluster) == before:
            return now
        now += 400.0
    raise AssertionError("never given up")


def test_a_group_that_always_fails_is_given_up_and_nothing_more_is_done() -> None:
    policy = {"spec.restartPolicy": {"maxRestarts": 2}}
    wanted = stored({**PAIR, **policy})
    cluster = settled(policy)
    now = fail_until_given_up(cluster, wanted)
    for kind in (names.READY, names.PROGRESSING, names.AVAILABLE):
        found = condition(cluster, kind)
        assert (found.status, found.reason) == ("False", names.REASON_RESTARTS_EXHAUSTED)
    ready = condition(cluster, names.READY)
    assert "decode group 0 of 1: given up after 2 restarts" in ready.message
    assert "last words" in ready.message
    assert next(role for role in cluster.status.roles if role.name == "decode").failed_groups == 1
    assert rebuild(cluster).failures == 3
    before = cluster.status
    for _ in range(5):
        now += LONG
        decision = cluster.run(wanted, now)
        assert not decision.apply
        assert not decision.delete_pods
        assert decision.wait_seconds is None
        assert cluster.status == before


def test_of_a_group_that_is_given_up_only_pods_that_have_ended_are_kept() -> None:
    policy = {"spec.restartPolicy": {"maxRestarts": 0}}
    cluster = settled(policy)
    crashed, other = sorted(decode_pods(cluster))
    cluster.objects["Pod", crashed]["status"] = end_of("Error")
    cluster.run(stored({**PAIR, **policy}), LONG)
    assert list(decode_pods(cluster)) == [crashed]
    assert other not in decode_pods(cluster)


def given_up() -> tuple[FakeCluster, dict[str, Any], float]:
    policy = {**PAIR, "spec.restartPolicy": {"maxRestarts": 1}}
    cluster = settled(policy)
    return cluster, policy, fail_until_given_up(cluster, stored(policy)) + 1.0


@pytest.mark.parametrize(
    "change",
    [{"spec.engine": {"maxSequences": 8}}, {"spec.restartPolicy": {"maxRestarts": 4}}],
    ids=["its template changes", "more restarts are allowed"],
)
def test_a_group_that_was_given_up_is_tried_again_when(change: dict[str, Any]) -> None:
    cluster, policy, now = given_up()
    wanted = stored({**policy, **change}, generation=2)
    for step in range(40):
        cluster.run(wanted, now + 100 * step)
        cluster.make_all_ready()
    assert condition(cluster, names.READY).status == "True"


def retry_of(cluster: FakeCluster, policy: dict[str, Any], **which: Any) -> Any:
    value = annotation_for("", cluster.status, failed(cluster.status, which.get("role"), which.get("group")))
    return stored({**policy, "metadata.annotations": {names.ANNOTATION_RETRY: value}})


def test_a_retry_has_the_group_made_again_at_once_and_counts_from_zero() -> None:
    cluster, policy, now = given_up()
    wanted = retry_of(cluster, policy)
    cluster.run(wanted, now)
    cluster.run(wanted, now)
    assert len(decode_pods(cluster)) == 2
    now = fail_until_given_up(cluster, wanted, now + 1)  # the fulfilled wish is no licence to fail for ever
    assert rebuild(cluster).failures == 2


def test_a_retry_of_another_group_changes_nothing() -> None:
    cluster, policy, now = given_up()
    before = decode_pods(cluster)
    for which in ({"role": "prefill"}, {"group": 3}):
        cluster.run(retry_of(cluster, policy, **which), now)
        assert decode_pods(cluster) == before


def test_a_second_wish_keeps_the_first_one_that_is_not_fulfilled_yet() -> None:
    cluster, _, _ = given_up()
    (chosen,) = failed(cluster.status, "decode", 0)
    first = annotation_for("prefill/7@2020-01-01T00:00:00Z", cluster.status, [chosen])
    assert wishes(first) == {("decode", 0): chosen.last_time}  # what is long done is dropped
    assert annotation_for(first, cluster.status, []) == first


@pytest.mark.parametrize("text", ["", "decode", "decode/0", "decode/x@2026-01-01T00:00:00Z", "decode/0@soon", "../0@1"])
def test_words_that_are_no_wish_are_ignored(text: str) -> None:
    assert wishes(text) == {}


def test_pods_of_the_next_try_prefer_any_node_but_the_bad_one() -> None:
    cluster = settled()
    now = LONG
    for _ in range(2 * BAD_NODE_FAILURES):
        for name in sorted(decode_pods(cluster))[:1]:
            pod = cluster.objects["Pod", name]
            pod["spec"]["nodeName"] = "node-7"
            pod["status"] = end_of("Error")
        cluster.run(stored(PAIR), now)
        now += 400.0
    for name in decode_pods(cluster):
        affinity = cluster.objects["Pod", name]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["preference"]["matchFields"] == [
            {"key": "metadata.name", "operator": "NotIn", "values": ["node-7"]}
        ]
    assert "node-7 (failed there 2 times)" in condition(cluster, names.READY).message
    assert rebuild(cluster).nodes[0].name == "node-7"
