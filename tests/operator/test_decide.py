"""One deployment's next step, and whole histories on a fake cluster."""

from __future__ import annotations

import copy

import pytest
from tests.operator.worlds import UID, FakeCluster, pod_status, stored

from headrace_operator import names
from headrace_operator.api_status import Status
from headrace_operator.status import topology

EXTERNAL = {"spec.scaling": {"mode": "External"}}
DEP2 = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}


def test_a_settled_deployment_needs_nothing() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(DEP2))
    decision = cluster.decide(stored(DEP2))
    assert (decision.apply, decision.delete_pods, decision.delete_children, decision.notes) == ((), (), (), ())
    assert {c.type: c.status for c in cluster.status.conditions} == {
        "Valid": "True",
        "Available": "True",
        "Progressing": "False",
        "Ready": "True",
        "Protected": "False",  # there is one group of each role
    }


def test_a_deleted_child_is_made_again_and_an_edited_one_repaired() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    whole = copy.deepcopy(cluster.objects)
    del cluster.objects["Service", "demo-decode-leaders"]
    cluster.objects["Deployment", "demo-router"]["spec"]["replicas"] = 9
    decision = cluster.run(stored())
    assert [(a.body["kind"], a.is_new) for a in decision.apply] == [("Service", True), ("Deployment", False)]
    assert set(cluster.objects) == set(whole)
    assert cluster.objects["Deployment", "demo-router"]["spec"]["replicas"] == 1
    assert [note.message for note in decision.repairs] == ["Deployment demo-router was edited and is brought back"]


def test_a_child_that_is_rendered_otherwise_is_no_edit() -> None:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles.1.replicas": 2}))
    decision = cluster.run(stored({"spec.roles.1.replicas": 3}, generation=2))
    (note,) = decision.repairs
    assert note.message == "PodDisruptionBudget demo-decode-leaders is brought up to date"


def test_a_relabelled_pod_gets_its_label_back_and_nothing_else_is_written_to_it() -> None:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles.1.template": {"labels": {"team": "x"}}}))
    (name,) = [name for name in cluster.pods() if "decode" in name]
    pod = cluster.pods()[name]
    pod["spec"]["containers"][0]["image"] = "mirror/engine:1"  # by admission
    pod["metadata"]["labels"]["team"] = "y"
    (application,) = cluster.run(stored({"spec.roles.1.template": {"labels": {"team": "x"}}})).apply
    assert application.is_metadata_only
    assert set(application.body) == {"apiVersion", "kind", "metadata"}
    assert cluster.pods()[name]["metadata"]["labels"]["team"] == "x"
    assert cluster.pods()[name]["spec"]["containers"][0]["image"] == "mirror/engine:1"


@pytest.mark.parametrize("is_rolling_out", [False, True])
@pytest.mark.parametrize(
    "parts", [{"labels"}, {"annotations"}, {"labels", "annotations"}], ids=["labels", "annotations", "both"]
)
def test_stripped_of_all_that_was_written_beside_their_specs_objects_get_it_back_and_no_pod_is_made(
    parts: set[str], is_rolling_out: bool
) -> None:
    """As by tools that replace metadata as a whole, and the status with it."""
    marked = {"labels": {"team": "x"}, "annotations": {"note": "y"}}
    wanted = stored({**DEP2, **EXTERNAL, "spec.roles.1.replicas": 2, "spec.roles.1.template": marked})
    cluster = FakeCluster()
    cluster.settle(wanted)
    if is_rolling_out:
        wanted = stored({**DEP2, **EXTERNAL, "spec.roles.1.replicas": 2}, generation=2)
        cluster.run(wanted)  # an old group of each role goes
        cluster.run(wanted)  # and new ones are made
    before = copy.deepcopy(cluster.objects)
    cluster.status = Status()
    for body in cluster.objects.values():
        found_by = {names.LABEL_DEPLOYMENT: body["metadata"]["labels"][names.LABEL_DEPLOYMENT]}
        body["metadata"] |= {"labels": found_by} if "labels" in parts else {}
        body["metadata"] |= {"annotations": {}} if "annotations" in parts else {}
    for _ in range(3):
        decision = cluster.run(wanted)
        assert (decision.delete_pods, decision.delete_children) == ((), ())
        assert not [a for a in decision.apply if a.is_new]
    stamp = {names.ANNOTATION_APPLIED: None}  # of pods it is not given back: it tells of what they were made from
    for key, body in cluster.objects.items():
        assert body["metadata"]["labels"] == before[key]["metadata"]["labels"]
        now, was = (each["metadata"].get("annotations", {}) for each in (body, before[key]))
        assert {**now, **stamp} == {**was, **stamp}


def test_kept_pods_are_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    wanted = stored({"spec.roles.0.replicas": 64})
    cluster.settle(wanted)

    def refuse(*_: object) -> None:
        raise AssertionError("a pass must stay cheap however many pods there are")

    monkeypatch.setattr("headrace_operator.companions.engine_pod", refuse)
    assert cluster.decide(wanted).apply == ()


def test_a_change_of_one_role_leaves_the_others_pods_alone() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods().items()}
    cluster.settle(stored({"spec.roles.1.template": {"labels": {"x": "1"}}}))
    after = {name: pod["metadata"]["uid"] for name, pod in cluster.pods().items()}
    assert {n: u for n, u in after.items() if "prefill" in n} == {n: u for n, u in before.items() if "prefill" in n}
    assert not {n for n in after if "decode" in n} & set(before)


def test_a_finished_rollout_leaves_nothing_of_the_old_revision_but_its_template() -> None:
    cluster, fresh = FakeCluster(), FakeCluster()
    new = stored({"spec.transfer": {"leaseSeconds": 5}})
    cluster.settle(stored())
    cluster.settle(new)
    fresh.settle(new)
    assert {kind for kind, _ in set(cluster.objects) - set(fresh.objects)} == {"ControllerRevision"}
    assert set(fresh.objects) <= set(cluster.objects)
    assert cluster.status.rebuilds == []


def test_a_removed_role_goes_with_its_services_and_revisions() -> None:
    cluster, fresh = FakeCluster(), FakeCluster()
    unified = stored({"spec.roles": [{"name": "unified"}]})
    cluster.settle(stored())
    cluster.settle(unified)
    fresh.settle(unified)
    assert set(cluster.objects) == set(fresh.objects)


def test_a_group_of_an_old_revision_is_made_again_from_its_own_template() -> None:
    cluster = FakeCluster()
    old = stored({"spec.roles.1.replicas": 2})
    new = stored({"spec.roles.1.replicas": 2, "spec.engine": {"maxSequences": 8}})
    cluster.settle(old)
    cluster.run(new)  # turns one group of each role over
    cluster.run(new)  # and makes its new pods, which never get ready
    victim = next(n for n, p in cluster.pods().items() if "decode" in n and p.get("status"))
    cluster.pods()[victim]["status"] = pod_status("Failed", state={"terminated": {"exitCode": 1}})
    cluster.run(new)
    assert victim not in cluster.pods()
    cluster.run(new, now=10.0)
    assert cluster.pods()[victim]["spec"]["containers"][0]["args"].count("32") == 1  # the old --max-sequences


def test_an_upgrade_of_the_operator_restarts_no_pod() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    for pod in cluster.pods().values():  # as if an older version had rendered it otherwise
        pod["metadata"]["annotations"][names.ANNOTATION_APPLIED] = "0" * 16
        pod["spec"]["containers"][0]["args"].append("--from-an-older-version")
    decision = cluster.decide(stored())
    assert (decision.apply, decision.delete_pods) == ((), ())


def test_a_default_image_is_kept_for_the_life_of_a_revision() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    for (kind, _), body in cluster.objects.items():
        if kind == "ControllerRevision":
            assert body["data"]["engine"]["image"] == "engine:1"


def test_objects_of_someone_else_are_not_taken_over() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    for body in cluster.objects.values():  # orphans of a deployment of the same name that was deleted
        body["metadata"]["ownerReferences"] = []
    before = copy.deepcopy(cluster.objects)
    decision = cluster.run(stored())
    assert decision.delete_pods == ()
    assert decision.delete_children == ()
    assert all((a.body["kind"], a.body["metadata"]["name"]) not in before for a in decision.apply)
    ready = next(c for c in cluster.status.conditions if c.type == "Ready")
    assert ready.reason == names.REASON_NAME_TAKEN
    assert "Pod demo-decode" in ready.message


def test_nothing_is_made_without_its_owner() -> None:
    for application in FakeCluster().decide(stored()).apply:
        (reference,) = application.body["metadata"]["ownerReferences"]
        assert reference["uid"] == UID
        assert reference["controller"] is True


def test_services_and_stored_templates_come_before_pods() -> None:
    kinds = [a.body["kind"] for a in FakeCluster().decide(stored()).apply]
    assert kinds.index("Pod") > max(i for i, kind in enumerate(kinds) if kind == "ControllerRevision")


def test_topology_in_words() -> None:
    assert topology(stored({**DEP2, "spec.roles.0.replicas": 2}).spec.roles) == "2xDP1 + 1xDEP2"
    assert topology(stored({"spec.roles": [{"name": "unified", "replicas": 3}]}).spec.roles) == "3xDP1 unified"
