"""Gangs: what marks the pods of a group as one, for whom, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.worlds import FakeCluster, stored

from headrace_operator import names
from headrace_operator.decide import Decision
from headrace_operator.gangs import is_held, others_finalizers
from headrace_operator.groups import GroupKey
from headrace_operator.optional import GANG_KINDS, OPTIONAL_APIS
from headrace_operator.pod_facts import pod_trouble

# A prefill group of one pod, and two decode groups of two pods.
SHAPE = {"spec.roles.1.replicas": 2, "spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}
QUEUES = {"Kueue": {"queue": "team-a"}, "Volcano": {"queue": "team-a"}}
WITH_OBJECTS = [names.GANG_NATIVE, names.GANG_VOLCANO]
ALL = [*WITH_OBJECTS, names.GANG_KUEUE]


def ganged(gang: str, **changes: Any) -> dict[str, Any]:
    return {**SHAPE, "spec.placement": {"gang": gang, **QUEUES.get(gang, {})}, **changes}


def mark(pod: dict[str, Any]) -> str | None:
    """Name of the gang that a pod is in, wherever it is written."""
    metadata = pod["metadata"]
    native = pod["spec"].get("workloadRef", {}).get("name")
    volcano = metadata["annotations"].get("scheduling.k8s.io/group-name")
    kueue = metadata["labels"].get("kueue.x-k8s.io/pod-group-name")
    assert sum(value is not None for value in (native, volcano, kueue)) <= 1
    return native or volcano or kueue


def marks(world: FakeCluster, role: str = "decode") -> dict[GroupKey, set[str | None]]:
    """What the pods of each group say."""
    found: dict[GroupKey, set[str | None]] = {}
    for pod in world.pods().values():
        labels = pod["metadata"]["labels"]
        if labels[names.LABEL_ROLE] == role:
            key = GroupKey(role, labels[names.LABEL_REVISION], int(labels[names.LABEL_GROUP]))
            found.setdefault(key, set()).add(mark(pod))
    return found


def objects(world: FakeCluster) -> dict[str, dict[str, Any]]:
    kinds = (names.WORKLOAD_KIND, names.VOLCANO_KIND)
    return {name: body for (kind, name), body in world.objects.items() if kind in kinds}


def one_pod(world: FakeCluster, role: str = "decode") -> dict[str, Any]:
    return next(pod for name, pod in world.pods().items() if f"-{role}-" in name)


def new_pods(decision: Decision) -> list[str]:
    return [a.body["metadata"]["name"] for a in decision.apply if a.is_new and a.body["kind"] == "Pod"]


def break_group(world: FakeCluster, role: str = "decode") -> None:
    one_pod(world, role)["status"] = {"phase": "Failed"}


@pytest.mark.parametrize("gang", ALL)
def test_every_group_is_a_gang_of_its_own_never_all_groups_together(gang: str) -> None:
    world = FakeCluster()
    world.run(stored(ganged(gang)))
    found = marks(world)
    assert len(found) == 2
    assert all(len(group) == 1 and None not in group for group in found.values())
    assert len(set.union(*found.values())) == 2


def test_the_schedulers_workload_asks_for_all_pods_of_the_group() -> None:
    world = FakeCluster()
    world.run(stored(ganged("Native")))
    workload = objects(world)[mark(one_pod(world)) or ""]
    assert workload["apiVersion"] == "scheduling.k8s.io/v1alpha1"
    assert workload["spec"] == {"podGroups": [{"name": "group", "policy": {"gang": {"minCount": 2}}}]}
    assert one_pod(world)["spec"]["workloadRef"]["podGroup"] == "group"


def test_volcanos_pod_group_has_the_size_of_the_group_and_its_queue_and_pods_name_its_scheduler() -> None:
    world = FakeCluster()
    world.run(stored(ganged("Volcano")))
    group = objects(world)[mark(one_pod(world)) or ""]
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 2, "queue": "team-a"}
    assert one_pod(world)["spec"]["schedulerName"] == "volcano"


def test_kueue_reads_queue_name_and_count_from_the_pods_alone() -> None:
    world = FakeCluster()
    world.run(stored(ganged("Kueue")))
    metadata = one_pod(world)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    # Else Kueue holds an ended pod until another replaces it, and the group waits for the pod to be gone.
    assert metadata["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"
    assert not objects(world)


@pytest.mark.parametrize(("gang", "is_gang"), [("Native", False), ("Volcano", True), ("Kueue", True)])
def test_one_pod_is_no_gang_for_a_scheduler_but_counts_in_a_queue(gang: str, is_gang: bool) -> None:
    world = FakeCluster()
    world.run(stored(ganged(gang)))
    assert (mark(one_pod(world, "prefill")) is not None) == is_gang


@pytest.mark.parametrize("gang", ALL)
def test_a_group_that_is_made_again_is_a_new_gang_and_the_old_one_goes(gang: str) -> None:
    world = FakeCluster()
    deployment = stored(ganged(gang))
    world.settle(deployment)
    before = marks(world)
    break_group(world)
    world.run(deployment, now=1000.0)  # it is taken away, and made again later
    world.settle(deployment, now=2000.0)
    changed = [key for key, group in marks(world).items() if group != before[key]]
    assert len(changed) == 1
    assert set(objects(world)) == {
        name
        for role in ("prefill", "decode")
        for group in marks(world, role).values()
        for name in group
        if name and gang in WITH_OBJECTS
    }


@pytest.mark.parametrize("gang", ALL)
def test_a_pod_that_is_made_beside_others_joins_their_gang(gang: str) -> None:
    world = FakeCluster()
    deployment = stored(ganged(gang))
    world.run(deployment)
    before = marks(world)
    for pod in world.pods().values():
        pod["status"] = {"phase": "Pending"}
    lost = next(name for name in world.pods() if "-decode-" in name)
    del world.objects["Pod", lost]
    world.run(deployment, now=1.0)
    assert lost in world.pods()
    assert marks(world) == before


@pytest.mark.parametrize(("before", "after"), [("None", "Volcano"), ("Volcano", "Kueue"), ("Native", "None")])
def test_another_gang_is_for_groups_that_are_made_from_then_on(before: str, after: str) -> None:
    world = FakeCluster()
    world.settle(stored(ganged(before)))
    uids = {name: pod["metadata"]["uid"] for name, pod in world.pods().items()}
    kept = objects(world)
    world.settle(stored(ganged(after)), now=1000.0)
    assert {name: pod["metadata"]["uid"] for name, pod in world.pods().items()} == uids
    assert objects(world) == kept, "their pods are still in it"
    world.settle(stored(ganged(after, **{"spec.roles.1.template": {"labels": {"round": "2"}}})), now=2000.0)
    assert all((None in group) == (after == "None") for group in marks(world).values())


@pytest.mark.parametrize("gang", ALL)
def test_without_its_scheduler_nothing_is_made_and_the_condition_says_what_is_missing(gang: str) -> None:
    world = FakeCluster()
    kind = GANG_KINDS[gang]
    decision = world.run(stored(ganged(gang)), problems={kind: OPTIONAL_APIS[kind].missing})
    assert not [name for name in new_pods(decision) if "-decode-" in name]
    assert not objects(world)
    progressing = next(c for c in world.status.conditions if c.type == names.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", names.REASON_API_MISSING)
    assert progressing.message.startswith(f"spec.placement.gang: {gang} needs the API")
    world.settle(stored(ganged(gang)), now=10.0)
    assert next(c for c in world.status.conditions if c.type == names.READY).status == "True"


def test_without_its_scheduler_no_serving_group_makes_way() -> None:
    world = FakeCluster()
    world.settle(stored(SHAPE))
    before = set(world.pods())
    changed = ganged("Volcano", **{"spec.roles.1.template": {"labels": {"round": "2"}}})
    world.run(stored(changed), now=1000.0, problems={names.VOLCANO_KIND: "not there"})
    assert set(world.pods()) == before


@pytest.mark.parametrize("gang", ALL)
def test_gates_schedulers_and_labels_of_others_stay(gang: str) -> None:
    template = {
        "labels": {"kueue.x-k8s.io/priority-class": "high"},
        "annotations": {"example.org/note": "kept"},
        "podSpec": {"schedulingGates": [{"name": "example.org/later"}], "schedulerName": "my-volcano"},
    }
    world = FakeCluster()
    world.run(stored(ganged(gang, **{"spec.roles.1.template": template})))
    pod = one_pod(world)
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert pod["metadata"]["annotations"]["example.org/note"] == "kept"
    assert pod["spec"]["schedulingGates"] == [{"name": "example.org/later"}]
    assert pod["spec"]["schedulerName"] == "my-volcano"


@pytest.mark.parametrize("gang", ALL)
def test_what_a_queue_adds_to_pods_later_is_not_taken_back(gang: str) -> None:
    world = FakeCluster()
    deployment = stored(ganged(gang))
    world.settle(deployment)
    pod = one_pod(world)
    pod["metadata"]["labels"]["kueue.x-k8s.io/managed"] = "true"
    pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    decision = world.decide(deployment, now=1000.0)
    assert not decision.apply
    assert not decision.delete_pods


def test_pods_that_kueue_does_not_look_at_are_told_of() -> None:
    world = FakeCluster()
    deployment = stored(ganged("Kueue"))
    world.settle(deployment)
    warnings = [note for note in world.decide(deployment).notes if note.is_warning]
    assert [note.reason for note in warnings] == ["GangIgnored"]
    assert "switch on its integration of plain pods for the namespace default" in warnings[0].message
    for pod in world.pods().values():
        pod["metadata"]["labels"]["kueue.x-k8s.io/managed"] = "true"
    assert not world.decide(deployment).notes


@pytest.mark.parametrize(
    ("metadata", "phase", "node", "is_held_"),
    [
        ({}, "Running", "node-a", True),
        ({}, "Pending", "node-a", True),
        ({}, "Pending", "", False),
        ({"deletionGracePeriodSeconds": 30}, "Running", "node-a", False),
        ({}, "Failed", "node-a", False),
        ({}, "Succeeded", "node-a", False),
        ({"deletionTimestamp": None}, "Running", "node-a", False),
        ({"finalizers": ["example.org/mine"]}, "Running", "node-a", False),
        ({"finalizers": None}, "Running", "node-a", False),
    ],
    ids=[
        "it was removed by force",
        "it was removed by force before it ran",
        "it never had a node: garbage collection ends it",
        "its kubelet ends it",
        "Kueue has seen it fail",
        "Kueue has seen it succeed",
        "nobody deletes it",
        "somebody else holds it",
        "nobody holds it",
    ],
)
def test_which_pods_kueue_would_hold_for_ever(metadata: dict[str, Any], phase: str, node: str, is_held_: bool) -> None:
    whole = {
        "name": "demo-decode-0",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": ["example.org/mine", "kueue.x-k8s.io/managed"],
    }
    kept = {field: value for field, value in (whole | metadata).items() if value is not None}
    spec = {"nodeName": node} if node else {}
    assert is_held({"kind": "Pod", "metadata": kept, "spec": spec, "status": {"phase": phase}}) == is_held_


def test_a_pod_that_kueue_lets_go_keeps_the_finalizers_of_others() -> None:
    pod = {"kind": "Pod", "metadata": {"finalizers": ["example.org/mine", "kueue.x-k8s.io/managed"]}}
    assert others_finalizers(pod) == ["example.org/mine"]


def test_a_gated_pod_says_which_gates_hold_it() -> None:
    pod = {
        "metadata": {"name": "demo-decode-0"},
        "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
    }
    trouble = pod_trouble(pod)
    assert trouble is not None
    assert trouble.reason == names.REASON_SCHEDULING_GATED
    assert trouble.message.endswith("whoever set them: kueue.x-k8s.io/admission")


def test_a_pod_in_a_queue_says_where_kueue_tells_what_it_waits_for() -> None:
    world = FakeCluster()
    world.run(stored(ganged("Kueue")))
    pod = one_pod(world)
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pod["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}
    trouble = pod_trouble(pod)
    assert trouble is not None
    assert f"kubectl describe workloads.kueue.x-k8s.io {mark(pod)}" in trouble.message


def test_the_longest_names_fit() -> None:
    name = names.gang_name("a" * names.MAX_NAME_LENGTH, "unified", names.MAX_GROUPS - 1, "0" * 8)
    assert len(name) <= 63
