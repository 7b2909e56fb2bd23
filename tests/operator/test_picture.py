"""The drawing of a deployment: what a person sees of groups, places and troubles."""

from __future__ import annotations

import json

from tests.operator.rule_cases import resource
from tests.operator.worlds import UID, FakeCluster, pod_status, stored

from headrace_operator.api_placement import Placement
from headrace_operator.observe import observe
from headrace_operator.picture import DOMAIN_LABEL, RoleView, as_data, domain_label, drawn, picture
from headrace_operator.status import as_applied

CHANGES = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}


def settled() -> FakeCluster:
    """One prefill group of one pod, one decode group of two, all on nodes and ready."""
    cluster = FakeCluster()
    cluster.settle(stored(CHANGES))
    for number, pod in enumerate(cluster.pods().values()):
        pod["spec"]["nodeName"] = f"node{number}"
    return cluster


def view(cluster: FakeCluster, domains: dict[str, str] | None = None) -> list[RoleView]:
    body = {**resource(CHANGES), "status": as_applied(cluster.status)}
    return picture(body, observe("demo", UID, cluster.objects.values()), domains or {})


def revisions(cluster: FakeCluster) -> list[str]:
    return [role.revision for role in cluster.status.roles]


def test_a_deployment_that_is_well() -> None:
    cluster = settled()
    prefill, decode = revisions(cluster)
    assert drawn(view(cluster, {"node0": "rack-a", "node1": "rack-b", "node2": "rack-b"})).splitlines() == [
        f"prefill  1/1 groups ready  revision {prefill}",
        "└─ group 0  Ready",
        f"   └─ demo-prefill-{prefill}-0-0  Ready      node0 (rack-a)",
        f"decode  1/1 groups ready  revision {decode}",
        "└─ group 0  Ready",
        f"   ├─ demo-decode-{decode}-0-0  Ready      node1 (rack-b)",
        f"   └─ demo-decode-{decode}-0-1  Ready      node2 (rack-b)",
    ]


def test_each_pod_says_what_keeps_it() -> None:
    cluster = settled()
    (name,) = [name for name in cluster.pods() if name.endswith("0-1")]
    pod = cluster.pods()[name]
    del pod["spec"]["nodeName"]
    pod["status"] = pod_status("Pending", state={"waiting": {"reason": "ErrImagePull", "message": "no such image"}})
    cluster.run(stored(CHANGES))
    text = drawn(view(cluster))
    assert "└─ group 0  Forming" in text
    assert f"{name}  Pending    no node  ImagePull: pod {name}: ErrImagePull: no such image" in text


def test_a_pod_that_has_ended_is_not_ready_whatever_its_condition_says() -> None:
    cluster = settled()
    name = next(name for name in cluster.pods() if "decode" in name)
    cluster.pods()[name]["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    assert f"{name}  Failed     node1  pod {name} ended: Evicted: low on memory" in drawn(view(cluster))


def test_an_empty_slot_says_why_it_waits() -> None:
    cluster = settled()
    for name, pod in cluster.pods().items():
        if "decode" in name:
            pod["status"] = pod_status("Failed", state={"terminated": {"exitCode": 3, "message": "no memory"}})
    cluster.run(stored(CHANGES))
    for name in [name for name in cluster.pods() if "decode" in name]:
        del cluster.objects["Pod", name]
    cluster.run(stored(CHANGES))
    assert "└─ group 0  Empty  pod demo-decode-" in drawn(view(cluster))
    assert "exited with code 3" in drawn(view(cluster))


def test_groups_of_an_old_revision_and_surplus_ones_are_marked() -> None:
    cluster = settled()
    old = revisions(cluster)[1]
    cluster.run(stored({**CHANGES, "spec.engine": {"maxSequences": 8}, "spec.roles.0.replicas": 0}, generation=2))
    for pod in settled().pods().values():
        cluster.store(pod)
    text = drawn(view(cluster))
    assert f"old revision {old}" in text
    assert "not wanted any more" in text


def test_the_same_as_plain_data() -> None:
    (prefill, _) = json.loads(json.dumps(as_data(view(settled(), {"node0": "rack-a"}))))
    assert (prefill["name"], prefill["wanted"], prefill["ready"]) == ("prefill", 1, 1)
    (group,) = prefill["groups"]
    assert (group["state"], group["isUpdated"], group["isWanted"]) == ("Ready", True, True)
    (pod,) = group["pods"]
    assert (pod["isReady"], pod["node"], pod["domain"]) == (True, "node0", "rack-a")


def test_a_deployment_that_nobody_has_looked_at_yet() -> None:
    assert drawn(picture(resource(), observe("demo", UID, []), {})).splitlines() == [
        "prefill  0/0 groups ready  revision -",
        "decode  0/0 groups ready  revision -",
    ]


def test_domains_are_told_apart_by_the_label_of_the_spec() -> None:
    assert domain_label(resource()) == DOMAIN_LABEL
    assert domain_label(resource({"spec.placement": {"domainLabel": "example.com/rack"}})) == "example.com/rack"


def test_the_label_is_the_default_of_the_spec() -> None:
    assert Placement().domain_label == DOMAIN_LABEL
