"""From API objects to the planner's data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.operator.worlds import UID, FakeCluster, pod_status, ready_status, stored

from headrace_operator import names
from headrace_operator.groups import Pod
from headrace_operator.mirror import slim
from headrace_operator.observe import ParsedPods, observe
from headrace_operator.pod_facts import pod_trouble


def settled() -> FakeCluster:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1}}))
    return cluster


def test_children_are_sorted_into_groups_by_label() -> None:
    observed = observe("demo", UID, settled().objects.values())
    assert sorted((key.role, key.index, [p.index for p in pods]) for key, pods in observed.groups.items()) == [
        ("decode", 0, [0, 1]),
        ("prefill", 0, [0]),
    ]
    assert {role for role, _ in observed.templates} == {"prefill", "decode"}


def test_only_the_owner_uid_makes_a_child() -> None:
    cluster = settled()
    observed = observe("demo", "another-uid", cluster.objects.values())
    assert observed.children == {}
    assert observed.groups == {}
    assert observed.strangers == set(cluster.objects)


@pytest.mark.parametrize("labels", [{}, {names.LABEL_GROUP: "7"}], ids=["none", "those of another group"])
def test_a_pod_is_where_its_name_says_whatever_its_labels_do(labels: dict[str, str]) -> None:
    cluster = settled()
    before = observe("demo", UID, cluster.objects.values())
    for pod in cluster.pods().values():
        pod["metadata"]["labels"] = dict(labels)
    after = observe("demo", UID, cluster.objects.values())
    assert (after.groups, after.misnamed) == (before.groups, ())


def test_a_pod_that_someone_made_as_ours_is_told_apart() -> None:
    cluster = settled()
    stray = copy.deepcopy(next(iter(cluster.pods().values())))
    stray["metadata"] |= {"name": "debug", "uid": "of-a-stray"}
    observed = observe("demo", UID, [*cluster.objects.values(), stray])
    assert [pod.uid for pod in observed.misnamed] == ["of-a-stray"]


def test_an_engine_that_ended_is_noticed_though_a_sidecar_keeps_its_pod_running() -> None:
    cluster = settled()
    pod = next(body for name, body in cluster.pods().items() if "prefill" in name)
    pod["status"] = pod_status("Running", state={"terminated": {"exitCode": 1}})
    pod["status"]["containerStatuses"].append({"name": "mesh", "state": {"running": {}}, "ready": True})
    observed = observe("demo", UID, cluster.objects.values())
    (found,) = next(pods for key, pods in observed.groups.items() if key.role == "prefill")
    assert found.is_finished
    assert found.trouble is not None
    assert "container engine exited with code 1" in found.trouble.message


def test_a_stored_template_that_cannot_be_read_is_left_out() -> None:
    cluster = settled()
    for (kind, _), body in cluster.objects.items():
        if kind == "ControllerRevision":
            body["data"] = {"model": "?"}
    assert observe("demo", UID, cluster.objects.values()).templates == {}


def edited(manager: str, generation: int) -> dict[str, Any]:
    body = copy.deepcopy(next(iter(settled().pods().values())))
    fields = {"f:spec": {"f:containers": {'k:{"name":"engine"}': {"f:image": {}}}}}
    body["metadata"] |= {"generation": generation, "managedFields": [{"manager": manager, "fieldsV1": fields}]}
    return slim(body, "Pod")


@pytest.mark.parametrize(
    ("manager", "generation", "is_edited"),
    [("kubectl-edit", 2, True), ("kubectl-edit", 1, False), (names.MANAGER, 2, False)],
)
def test_an_image_changed_in_place_is_an_edit(manager: str, generation: int, is_edited: bool) -> None:
    observed = observe("demo", UID, [edited(manager, generation)])
    ((pod,),) = observed.groups.values()
    assert pod.is_edited is is_edited


def test_a_pod_is_parsed_again_when_it_has_changed_or_is_another_one_and_only_then() -> None:
    cluster = settled()
    parsed = ParsedPods()

    def pods() -> dict[str, Pod]:
        observed = observe("demo", UID, cluster.objects.values(), parsed)
        return {pod.name: pod for members in observed.groups.values() for pod in members}

    before = pods()
    changed, replaced, same = (cluster.objects["Pod", name] for name in sorted(before))
    changed["metadata"]["resourceVersion"] += "0"
    changed["status"] = pod_status("Failed")
    replaced["metadata"]["uid"] = "another"
    replaced["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    after = pods()
    assert after[changed["metadata"]["name"]].is_finished
    assert after[replaced["metadata"]["name"]].is_terminating
    name = same["metadata"]["name"]
    assert after[name] is before[name]
    del cluster.objects["Pod", name]
    pods()
    cluster.objects["Pod", name] = same
    assert pods()[name] is not before[name]  # what is gone is not remembered


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return pod_status("Pending", state={"waiting": {"reason": reason, "message": message}})


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}],
}


@pytest.mark.parametrize(
    ("status", "reason", "part"),
    [
        ({}, names.REASON_STARTING, "pod p is starting"),
        (UNSCHEDULABLE, names.REASON_UNSCHEDULABLE, "0/3 nodes are available"),
        (waiting("ImagePullBackOff", "no such image"), names.REASON_IMAGE_PULL, "ImagePullBackOff: no such image"),
        (waiting("CreateContainerConfigError"), names.REASON_CANNOT_START, "CreateContainerConfigError"),
        (waiting("ContainerCreating"), names.REASON_STARTING, "starting"),
        (pod_status(started=True, ready=False), names.REASON_PROBE_FAILING, "readiness probe fails"),
        (pod_status(started=False, ready=False), names.REASON_STARTING, "starting"),
        (
            pod_status("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "a\nb\n"}}),
            names.REASON_CRASH_LOOP,
            "container engine exited with code 137 (OOMKilled)\na\nb",
        ),
        (
            {
                "phase": "Failed",
                "initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 0}}}],
                "containerStatuses": [{"name": "engine", "state": {"terminated": {"exitCode": 2}}}],
            },
            names.REASON_CRASH_LOOP,
            "container engine exited with code 2",
        ),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"name": "fetch", "state": {"waiting": {"reason": "ErrImagePull"}}}],
                "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            names.REASON_IMAGE_PULL,
            "ErrImagePull",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, names.REASON_CRASH_LOOP, "Evicted: disk"),
    ],
)
def test_why_a_pod_is_not_ready(status: dict[str, Any], reason: str, part: str) -> None:
    trouble = pod_trouble({"metadata": {"name": "p"}, "status": status})
    assert trouble is not None
    assert trouble.reason == reason
    assert part in trouble.message


CLAIMS = [
    {"name": "gpus", "resourceClaimTemplateName": "four-gpus"},
    {"name": "nic", "resourceClaimTemplateName": "one-nic"},
    {"name": "shared", "resourceClaimName": "made-by-somebody"},
]
ONE_MADE = {"resourceClaimStatuses": [{"name": "nic", "resourceClaimName": "p-nic-x"}, {"name": "gpus"}]}
ALL_MADE = {"resourceClaimStatuses": [{"name": name, "resourceClaimName": f"p-{name}"} for name in ("nic", "gpus")]}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ONE_MADE, names.REASON_WAITING_FOR_CLAIM),
        (ALL_MADE, names.REASON_STARTING),
        ({**ALL_MADE, **UNSCHEDULABLE}, names.REASON_UNSCHEDULABLE),
    ],
    ids=["no template", "made", "made, and no devices"],
)
def test_a_pod_whose_device_claims_are_not_made_says_which(status: dict[str, Any], reason: str) -> None:
    trouble = pod_trouble({"metadata": {"name": "p"}, "spec": {"resourceClaims": CLAIMS}, "status": status})
    assert trouble is not None
    assert trouble.reason == reason
    is_told = "p waits for its device claims: gpus of the ResourceClaimTemplate four-gpus (" in trouble.message
    assert is_told == (reason == names.REASON_WAITING_FOR_CLAIM)


def test_a_ready_pod_has_no_trouble() -> None:
    assert pod_trouble({"metadata": {"name": "p"}, "status": ready_status()}) is None


def test_long_last_words_are_cut_at_the_front() -> None:
    status = pod_status("Failed", state={"terminated": {"exitCode": 1, "message": "x" * 5000 + "the end"}})
    trouble = pod_trouble({"metadata": {"name": "p"}, "status": status})
    assert trouble is not None
    assert len(trouble.message) < 2700
    assert trouble.message.endswith("the end")
