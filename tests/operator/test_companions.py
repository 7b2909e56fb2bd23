"""ComputeDomains and device claims of groups: who has one, how long, and what becomes of groups that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.worlds import FakeCluster, pod_status, stored

from headrace_operator import names
from headrace_operator.decide import Decision
from headrace_operator.observe import observe
from headrace_operator.optional import OPTIONAL_APIS
from headrace_operator.revision import RoleTemplate

KIND = names.COMPUTE_DOMAIN_KIND
MISSING = {KIND: OPTIONAL_APIS[KIND].missing}
SHARED = {"spec.placement": {"group": "SameDomain", "computeDomain": True}}
ALONE = {"spec.placement": {"group": "SameDomain"}}
# Prefill groups of one pod, and two decode groups of two pods.
SHAPE = {
    "spec.roles.1.replicas": 2,
    "spec.roles.1.parallelism": {"data": 8, "dataLocal": 4, "expert": True},
}
RACK = {**SHAPE, **SHARED}


def domains(world: FakeCluster) -> dict[str, dict[str, Any]]:
    return {name: body for (kind, name), body in world.objects.items() if kind == KIND}


def made(decision: Decision, kind: str) -> list[str]:
    return [a.body["metadata"]["name"] for a in decision.apply if a.is_new and a.body["kind"] == kind]


def claims(pod: dict[str, Any]) -> dict[str, str]:
    used = {claim["name"] for claim in pod["spec"]["containers"][0].get("resources", {}).get("claims", ())}
    given = {c["name"]: c["resourceClaimTemplateName"] for c in pod["spec"].get("resourceClaims", ())}
    assert used == set(given), "the engine uses every claim of its pod"
    return given


def test_every_group_of_several_pods_has_a_domain_of_its_own_and_its_pods_claim_a_channel_of_it() -> None:
    world = FakeCluster()
    world.run(stored(RACK))
    assert len(domains(world)) == 2
    for pod in world.pods().values():
        labels = pod["metadata"]["labels"]
        own = pod["metadata"]["name"].rpartition("-")[0]
        expected = {names.CLAIM_COMPUTE_DOMAIN: own} if labels[names.LABEL_ROLE] == names.DECODE else {}
        assert claims(pod) == expected
    for name, domain in domains(world).items():
        assert domain["spec"]["channel"]["resourceClaimTemplate"]["name"] == name
        assert domain["metadata"]["ownerReferences"][0]["kind"] == names.KIND


def test_pods_are_made_with_their_domain_not_after_it_is_ready() -> None:
    decision = FakeCluster().decide(stored(RACK))
    assert len(made(decision, KIND)) == 2
    assert len(made(decision, "Pod")) == 1 + 2 * 2


def test_a_domain_stays_while_its_group_is_made_again_and_goes_after_its_last_pod() -> None:
    world = FakeCluster()
    deployment = stored(RACK)
    world.settle(deployment)
    uids = {name: body["metadata"]["uid"] for name, body in domains(world).items()}
    victim = next(name for name in world.pods() if "-decode-" in name)
    world.objects["Pod", victim]["status"] = {"phase": "Failed"}
    world.run(deployment, now=10.0)  # its group is deleted
    assert {name: body["metadata"]["uid"] for name, body in domains(world).items()} == uids
    world.settle(deployment, now=1000.0)
    assert {name: body["metadata"]["uid"] for name, body in domains(world).items()} == uids
    world.settle(stored({**RACK, "spec.roles.1.replicas": 1}), now=2000.0)
    assert len(domains(world)) == 1


def test_a_changed_template_is_a_new_domain() -> None:
    world = FakeCluster()
    world.settle(stored(RACK))
    before = set(domains(world))
    world.settle(stored({**RACK, "spec.roles.1.template": {"labels": {"round": "2"}}}), now=1000.0)
    assert len(domains(world)) == 2
    assert before.isdisjoint(domains(world))


@pytest.mark.parametrize(("before", "after"), [(ALONE, SHARED), (SHARED, ALONE)])
def test_a_change_of_the_field_is_a_roll_out_of_groups_of_several_pods_alone(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    world = FakeCluster()
    world.settle(stored({**SHAPE, **before}))
    uids = {name: body["metadata"]["uid"] for name, body in world.pods().items()}
    world.settle(stored({**SHAPE, **after}), now=1000.0)
    kept = {name for name, body in world.pods().items() if uids.get(name) == body["metadata"]["uid"]}
    assert kept == {name for name in world.pods() if "-prefill-" in name}
    assert len(domains(world)) == (2 if after is SHARED else 0)


def test_revisions_of_those_who_do_not_ask_for_it_are_what_they_were() -> None:
    without = RoleTemplate.of(stored(SHAPE).spec, names.DECODE)
    assert "computeDomain" not in without.as_written()
    assert RoleTemplate.of(stored({**SHAPE, **ALONE}).spec, names.DECODE).revision == without.revision


def test_without_the_api_groups_wait_and_the_condition_says_for_what() -> None:
    world = FakeCluster()
    deployment = stored(RACK)
    decision = world.run(deployment, problems=MISSING)
    assert made(decision, "Pod") == [name for name in made(decision, "Pod") if "-prefill-" in name]
    assert not domains(world)
    progressing = next(c for c in world.status.conditions if c.type == names.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", names.REASON_API_MISSING)
    assert "resource.nvidia.com/v1beta1" in progressing.message
    assert "install NVIDIA's DRA driver" in progressing.message
    assert [note.reason for note in decision.notes if note.is_warning] == [names.REASON_API_MISSING]
    assert not [note for note in world.run(deployment, problems=MISSING).notes if note.is_warning], "told once"
    world.settle(deployment, now=10.0)  # the CRD is there
    assert len(domains(world)) == 2
    assert next(c for c in world.status.conditions if c.type == names.READY).status == "True"


def test_without_the_api_no_old_group_makes_way() -> None:
    world = FakeCluster()
    world.settle(stored({**SHAPE, **ALONE}))
    before = {name: body["metadata"]["uid"] for name, body in world.pods().items()}
    world.run(stored(RACK), now=1000.0, problems=MISSING)
    assert {name: body["metadata"]["uid"] for name, body in world.pods().items()} == before
    ready = next(c for c in world.status.conditions if c.type == names.READY)
    assert (ready.status, ready.reason) == ("False", names.REASON_API_MISSING)
    assert next(c for c in world.status.conditions if c.type == names.AVAILABLE).status == "True"
    world.settle(stored(RACK), now=1010.0)
    assert len(domains(world)) == 2


def test_a_kind_that_cannot_be_used_for_now_is_not_taken_from_groups_that_have_it() -> None:
    world = FakeCluster()
    world.settle(stored(RACK))
    decision = world.decide(stored(RACK), now=1000.0, problems={KIND: "computedomains is forbidden"})
    assert not decision.delete_children
    assert not decision.delete_pods
    assert not decision.apply


def test_a_group_waits_until_the_domain_of_the_one_before_it_is_gone() -> None:
    world = FakeCluster()
    deployment = stored(RACK)
    world.settle(deployment)
    name, domain = next(iter(domains(world).items()))
    domain["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for pod in [pod for pod in world.pods() if pod.startswith(f"{name}-")]:
        del world.objects["Pod", pod]
    decision = world.decide(deployment, now=1000.0)
    assert not made(decision, "Pod")
    blocked = [trouble for plan in decision.plans.values() for trouble in plan.blocked]
    assert [trouble.reason for trouble in blocked] == [names.REASON_WAITING_FOR_COMPUTE_DOMAIN]
    del world.objects[KIND, name]
    decision = world.decide(deployment, now=1000.0)
    assert made(decision, KIND) == [name]
    assert len(made(decision, "Pod")) == 2


def test_a_domain_of_someone_else_is_never_shared() -> None:
    world = FakeCluster()
    deployment = stored(RACK)
    name = made(world.decide(deployment), KIND)[0]
    world.run(deployment)
    foreign = world.objects[KIND, name]
    world.objects = {(KIND, name): foreign}
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    decision = world.decide(deployment)
    assert not [pod for pod in made(decision, "Pod") if pod.startswith(f"{name}-")]
    assert names.REASON_NAME_TAKEN in {t.reason for plan in decision.plans.values() for t in plan.blocked}


def test_a_pod_that_its_domain_holds_back_says_so_with_numbers() -> None:
    world = FakeCluster()
    deployment = stored(RACK)
    world.settle(deployment)
    name, domain = next(iter(domains(world).items()))
    nodes = [{"name": "node-a", "status": "Ready"}, {"name": "node-b", "status": "NotReady"}]
    domain["status"] = {"status": "NotReady", "nodes": nodes}
    pod = world.objects["Pod", f"{name}-0"]
    pod["spec"]["nodeName"] = "node-a"
    pod["status"] = pod_status("Pending", state={"waiting": {"reason": "ContainerCreating"}})
    observed = observe("demo", deployment.metadata.uid, world.objects.values())
    trouble = next(p.trouble for pods in observed.groups.values() for p in pods if p.name == f"{name}-0")
    assert trouble is not None
    assert trouble.reason == names.REASON_WAITING_FOR_COMPUTE_DOMAIN
    assert f"waits for ComputeDomain {name}: 1 of the 2 nodes that joined it are ready" in trouble.message


def test_devices_of_a_driver_are_claimed_for_each_pod_beside_what_its_template_claims() -> None:
    world = FakeCluster()
    template = {
        "podSpec": {
            "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "one-nic"}],
            "containers": [{"name": "engine", "resources": {"claims": [{"name": "nic"}]}}],
        }
    }
    gpus = {"claims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}], "limits": {"cpu": 8}}
    world.run(stored({**RACK, "spec.roles.1.resources": gpus, "spec.roles.1.template": template}))
    name, pod = next((name, pod) for name, pod in world.pods().items() if "-decode-" in name)
    assert claims(pod) == {
        "nic": "one-nic",
        "gpus": "four-gpus",
        names.CLAIM_COMPUTE_DOMAIN: name.rpartition("-")[0],
    }
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"cpu": 8}
