"""Placement on pretended racks of a real API server and scheduler: 18 nodes of 4 GPUs share one clique.

Pods on pretended nodes are Ready as soon as they are bound; what is seen is where they go and what waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.support.cluster import Cluster
from tests.operator import kube
from tests.operator.kube import eventually
from tests.operator.rule_cases import resource

from headrace_operator import names
from headrace_operator.admission import PLACEMENT_LIMIT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIQUE = "nvidia.com/gpu.clique"
NODES_PER_RACK = 18
ON_RACKS = {
    "nodeSelector": {"headrace.dev/node-kind": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
}
PORT = 30999  # of the node: taken by one pod, no other pod that wants it fits there


def run_kwok(*arguments: str) -> None:
    script = Path(__file__).parents[2] / "e2e/cluster/cluster.py"
    subprocess.run(
        [sys.executable, str(script), "kwok", *arguments], check=True, timeout=500, stdout=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def rack(cluster: Cluster) -> Iterator[None]:
    """One rack of pretended nodes."""
    if not cluster.is_one_machine:
        pytest.skip("pretended nodes are only made on the one-machine cluster")
    run_kwok("up", str(NODES_PER_RACK))
    yield
    run_kwok("down")


@pytest.fixture
def namespace(cluster: Cluster, rack: None) -> Iterator[kube.Namespace]:
    """Empty; waits at the end until its pods have left the rack."""
    name = f"capacity-{os.getpid()}"
    cluster.kubectl("create", "namespace", name)
    yield kube.Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=true", "--timeout=80s")


def deployment(
    name: str,
    prefill_groups: int,
    decode_pods: int,
    template: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Prefill groups of a pod of 4 GPUs, and one decode group of so many such pods, each group in one rack."""
    return resource(
        {
            "metadata.name": name,
            "spec.placement": {"group": "SameDomain"},
            "spec.drainTimeoutSeconds": 0,
            "spec.router": {"replicas": 0},
            "spec.roles.0.replicas": prefill_groups,
            "spec.roles.0.parallelism": {"data": 4, "expert": True},
            "spec.roles.0.resources": {"gpu": 4},
            "spec.roles.0.template": ON_RACKS,
            "spec.roles.1.parallelism": {"data": 4 * decode_pods, "dataLocal": 4, "expert": True},
            "spec.roles.1.resources": {"gpu": 4},
            "spec.roles.1.template": {**ON_RACKS, **(template or {})},
            **(changes or {}),
        }
    )


def all_groups_ready(namespace: kube.Namespace, name: str) -> bool:
    roles = ((namespace.get("dd", name) or {}).get("status") or {}).get("roles") or []
    spec = (namespace.get("dd", name) or {})["spec"]["roles"]
    return [r["readyGroups"] for r in roles] == [r["replicas"] for r in spec]


def test_8p1d_comes_up_on_one_rack(namespace: kube.Namespace) -> None:
    namespace.apply(deployment("flash", prefill_groups=8, decode_pods=8))
    eventually(lambda: all_groups_ready(namespace, "flash"))
    pods = namespace.list("pods", "flash")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 16  # of 18 nodes
    assert {pod["spec"]["nodeSelector"][CLIQUE] for pod in pods} == {"clique-0"}


def test_of_two_deployments_that_need_the_last_rack_one_comes_up_and_the_other_says_why_it_waits(
    namespace: kube.Namespace,
) -> None:
    both = [deployment(name, prefill_groups=1, decode_pods=11) for name in ("first", "second")]
    namespace.run("apply", "--server-side", "-f", "-", body={"apiVersion": "v1", "kind": "List", "items": both})
    winner = eventually(lambda: next((n for n in ("first", "second") if all_groups_ready(namespace, n)), None))
    loser = "second" if winner == "first" else "first"
    waiting = eventually(
        lambda: (c := namespace.condition(loser, names.PROGRESSING)).get("reason") == names.REASON_NO_CAPACITY and c
    )
    assert waiting["status"] == "False"
    assert "decode needs 44 GPUs (11 pods of 4) in one domain; the freest, clique-0, has " in waiting["message"]
    assert not namespace.pod_uids(loser, "decode")
    namespace.run("delete", "dd", winner)
    eventually(lambda: all_groups_ready(namespace, loser))


def image(tag: str) -> dict[str, Any]:
    """A template that gives the engine another image."""
    return {"podSpec": {"containers": [{"name": "engine", "image": f"none:{tag}"}]}}


def planned(namespace: kube.Namespace, body: dict[str, Any]) -> dict[str, Any]:
    """What `headrace plan-rollout` says would follow if this were applied now."""
    command = [sys.executable, "-m", "headrace_operator.cli", "plan-rollout", "-", "-n", namespace.name, "-o", "json"]
    environment = {**os.environ, "KUBECONFIG": str(namespace.cluster.kubeconfig)}
    run = subprocess.run(command, input=json.dumps(body), env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    result: dict[str, Any] = json.loads(run.stdout)
    assert (run.returncode, result["room"]) == (1 if result["blocked"] else 0, "nodes")
    return result


def test_on_a_full_rack_a_change_says_what_is_missing_and_goes_on_once_it_may_recreate(
    namespace: kube.Namespace,
) -> None:
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    namespace.apply(deployment("flash", 8, 8, image("1"), {"spec.rolloutStrategy": surge}))
    eventually(lambda: all_groups_ready(namespace, "flash"))
    before = namespace.pod_uids("flash")
    missing = "decode needs 32 GPUs (8 pods of 4) in one domain; the freest, clique-0, has 8"
    wait = deployment("flash", 8, 8, image("2"), {"spec.rolloutStrategy": {**surge, "whenFull": "Wait"}})
    plan = planned(namespace, wait)
    assert plan["steps"] == []
    assert missing in plan["blocked"][0]
    namespace.apply(wait)
    waiting = eventually(
        lambda: (c := namespace.condition("flash", names.PROGRESSING)).get("reason") == names.REASON_NO_CAPACITY and c
    )
    assert waiting["status"] == "False"
    assert missing in waiting["message"]
    assert namespace.pod_uids("flash") == before
    recreate = deployment("flash", 8, 8, image("2"), {"spec.rolloutStrategy": {**surge, "whenFull": "Recreate"}})
    plan = planned(namespace, recreate)
    assert [action["verb"] for step in plan["steps"] for action in step["actions"]] == ["remove", "make"]
    assert plan["blocked"] == []
    namespace.apply(recreate)
    eventually(lambda: namespace.condition("flash", names.READY).get("status") == "True")
    after = namespace.pod_uids("flash")
    kept = {name: uid for name, uid in before.items() if "-prefill-" in name}
    assert kept.items() <= after.items()
    assert len(after) == len(before)
    decode = [pod for pod in namespace.list("pods", "flash") if "-decode-" in pod["metadata"]["name"]]
    assert {pod["spec"]["containers"][0]["image"] for pod in decode} == {"none:2"}


@pytest.fixture
def second_rack(rack: None) -> Iterator[None]:
    """Eight nodes of another rack: room for one decode group."""
    run_kwok("up", str(NODES_PER_RACK + 8))
    yield
    run_kwok("up", str(NODES_PER_RACK))


def test_8p1d_becomes_4p2d_on_two_racks_and_never_needs_more_than_it_asks_for(
    second_rack: None, namespace: kube.Namespace
) -> None:
    def wait_ready() -> None:
        eventually(lambda: namespace.condition("flash", names.READY).get("status") == "True")

    namespace.apply(deployment("flash", prefill_groups=8, decode_pods=8))
    wait_ready()
    with kube.PodHistory(namespace) as history:
        namespace.apply(deployment("flash", 4, 8, changes={"spec.roles.1.replicas": 2}))
        wait_ready()
    assert history.most_pods <= 20  # 80 GPUs: the spec's. 16 were there before
    assert history.most_pods_on_a_node == 1
    sizes = Counter(name.rpartition("-")[0] for name in namespace.pod_uids("flash"))
    assert sorted(sizes.values()) == [1, 1, 1, 1, 8, 8]
    racks: dict[str, set[str]] = {}
    for pod in namespace.list("pods", "flash"):
        rack_of_pod = int(pod["spec"]["nodeName"].removeprefix("kwok-")) // NODES_PER_RACK
        racks.setdefault(pod["metadata"]["name"].rpartition("-")[0], set()).add(str(rack_of_pod))
    assert all(len(found) == 1 for found in racks.values())


def occupier(index: int) -> dict[str, Any]:
    """Somebody's pod that holds `PORT` of one node, which the operator does not look at."""
    container = {"name": "c", "image": "none", "ports": [{"containerPort": PORT, "hostPort": PORT}]}
    selector = {"kubernetes.io/hostname": f"kwok-{index}"}
    spec = {"containers": [container], "tolerations": ON_RACKS["tolerations"], "nodeSelector": selector}
    metadata = {"name": f"occupier-{index}", "labels": {"app": "occupier"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.long
def test_a_group_that_others_pods_keep_from_being_whole_is_taken_back_and_made_again(namespace: kube.Namespace) -> None:
    taken = [occupier(index) for index in range(NODES_PER_RACK - 1)]
    namespace.apply({"apiVersion": "v1", "kind": "List", "items": taken})
    eventually(
        lambda: (
            namespace.run(
                "get", "pods", "-l", "app=occupier", "-o", "name", "--field-selector=status.phase=Running"
            ).count("pod/")
            == len(taken)
        )
    )
    port = {"name": "engine", "ports": [{"name": "taken", "containerPort": PORT, "hostPort": PORT}]}
    namespace.apply(deployment("flash", 1, 2, {"podSpec": {"containers": [port]}}))
    eventually(lambda: len(namespace.pod_uids("flash", "decode")) == 2)
    eventually(lambda: not namespace.pod_uids("flash", "decode"), PLACEMENT_LIMIT_SECONDS + 30)
    said = (names.REASON_NO_CAPACITY, names.REASON_REBUILDING)
    eventually(lambda: namespace.condition("flash", names.PROGRESSING)["reason"] in said)
    events = namespace.run(
        "get", "events", "--field-selector=reason=GroupTakenBack", "-o", "jsonpath={.items[*].message}"
    )
    assert "1 of 2 pods had a node" in events
    namespace.run("delete", "pods", "-l", "app=occupier", "--wait=false")
    eventually(lambda: all_groups_ready(namespace, "flash"))
    assert not [r for r in (namespace.get("dd", "flash") or {})["status"].get("rebuilds", []) if r["failures"]]
