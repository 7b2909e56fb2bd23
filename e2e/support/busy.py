"""A deployment that is asked all the time: two prefill and two decode groups, and questions whose answers are known."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from e2e.support import headrace
from e2e.support.cluster import Cluster
from e2e.support.progress import say, wait_for
from e2e.support.reference import greedy_batch
from e2e.support.traffic import PATIENT, Patience, Question, Report, traffic

NAME = "busy"
LABEL = f"headrace.dev/deployment={NAME}"
PROMPT_LENGTHS = (24, 150)  # tokens; below and above one block
NUM_PROMPTS = 8  # of each length
NUM_TOKENS = 32
LEAD_SECONDS, TAIL_SECONDS = 1.5, 2.0  # traffic before and after what happens
# Without a request pods get next to nothing of a busy machine, and what is measured is how long they wait.
CPU_SHARE = {"requests": {"cpu": "400m"}}
HOST = "kubernetes.io/hostname"
ROUTER_LABELS = {"headrace.dev/deployment": NAME, "app.kubernetes.io/component": "router"}


def manifest(**roles: dict[str, Any]) -> dict[str, Any]:
    """Two groups of each role, those of a role on different nodes where there are enough.

    roles: fields of a role that are other than that; `template` is merged.
    """
    found = copy.deepcopy(headrace.example("tiny-1p1d"))
    found["metadata"]["name"] = NAME
    found["spec"]["router"] = {"replicas": 2, "resources": CPU_SHARE}
    for role in found["spec"]["roles"]:
        apart = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"headrace.dev/role": role["name"]}}}
        preferred = [{"weight": 100, "podAffinityTerm": apart}]
        affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        change = roles.get(role["name"], {})
        role |= {
            "replicas": 2,
            "resources": CPU_SHARE,
            **change,
            "template": {"affinity": affinity, **change.get("template", {})},
        }
    return found


def one_group_per_node(router_on: str, engines_on: str) -> dict[str, Any]:
    """As `manifest`, on three nodes: each but `router_on` has one group of each role, each but `engines_on` one router.
    So what is lost with a node is known, and nothing takes its place meanwhile."""
    found = manifest()
    for role in found["spec"]["roles"]:
        role["template"]["affinity"] = _one_per_node({"headrace.dev/role": role["name"]}, router_on)
    affinity = _one_per_node(ROUTER_LABELS, engines_on)
    found["spec"]["router"]["template"] = {"affinity": affinity}
    return found


def _one_per_node(labels: dict[str, str], elsewhere_than: str) -> dict[str, Any]:
    """The affinity of pods with these labels: at most one on a node, none on that one."""
    apart = {"topologyKey": HOST, "labelSelector": {"matchLabels": labels}}
    elsewhere = {"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": [elsewhere_than]}]}
    return {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [elsewhere]}},
    }


def known_questions() -> list[Question]:
    """Questions of both lengths in turn, with the greedy answers of transformers."""
    found = []
    for length in PROMPT_LENGTHS:
        prompts = [
            [4 + (7 * i + 31 * n + i * i * (1 + n % 3)) % 250 for i in range(length)] for n in range(NUM_PROMPTS)
        ]
        answers = greedy_batch(prompts, NUM_TOKENS)
        found.append([Question(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)])
    return [question for pair in zip(*found, strict=True) for question in pair]


@contextmanager
def serving(
    cluster: Cluster, namespace: str, deployment: dict[str, Any], prepare: Callable[[], object]
) -> Iterator[str]:
    """The URL of the deployment, once it is Ready and answers; `prepare` runs while its pods start."""
    cluster.apply(deployment, namespace)
    with ThreadPoolExecutor(1) as pool:
        ready: Future[Any] = pool.submit(headrace.wait_ready, cluster, NAME, namespace)
        prepare()
        ready.result()
    with cluster.service_url(NAME, namespace=namespace) as url:
        headrace.wait_answer(f"{url}/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 1})
        yield url


def pods(cluster: Cluster, namespace: str, role: str = "") -> list[dict[str, Any]]:
    """Engine pods that live."""
    return _living(cluster, namespace, f"{LABEL},headrace.dev/role" + (f"={role}" if role else ""))


def routers(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """Router pods that live."""
    return _living(cluster, namespace, ",".join(f"{key}={value}" for key, value in ROUTER_LABELS.items()))


def _living(cluster: Cluster, namespace: str, selector: str) -> list[dict[str, Any]]:
    return [pod for pod in cluster.list("pods", selector, namespace) if not pod["metadata"].get("deletionTimestamp")]


def gather_routers(cluster: Cluster, namespace: str, node: str) -> None:
    """Have all routers on one node: the others take no pods while they are made again."""
    nodes = [found for found in cluster.list("nodes") if not found["spec"].get("unschedulable")]
    others = [found["metadata"]["name"] for found in nodes if found["metadata"]["name"] != node]

    def are_there() -> bool:
        places = {pod["spec"].get("nodeName") for pod in routers(cluster, namespace)}
        resource = cluster.get(headrace.KIND, NAME, namespace)
        return places == {node} and resource is not None and headrace.is_ready(resource)

    old = [pod["metadata"]["name"] for pod in routers(cluster, namespace)]
    cluster.kubectl("cordon", *others)
    try:
        cluster.kubectl("delete", "pods", "-n", namespace, *old)
        wait_for(f"the routers on {node}", are_there, timeout_seconds=120)
    finally:
        cluster.kubectl("uncordon", *others)


def resize(cluster: Cluster, namespace: str, num_groups: int) -> None:
    """Ask for so many groups of each role, and for no other change."""
    change = [{"op": "replace", "path": f"/spec/roles/{at}/replicas", "value": num_groups} for at in range(2)]
    cluster.kubectl("patch", headrace.KIND, NAME, "-n", namespace, "--type=json", "-p", json.dumps(change))


def under_traffic(
    url: str, questions: list[Question], action: Callable[[], object], patience: Patience = PATIENT
) -> Report:
    """How every request ended that was under way while `action` ran, or a little before or after."""
    with traffic(url, "tiny", questions, patience=patience) as report:
        time.sleep(LEAD_SECONDS)
        began = time.monotonic()
        action()
        say(f"what was to happen took {time.monotonic() - began:.1f} s")
        time.sleep(TAIL_SECONDS)
    say(str(report))
    return report


def wait_settled(cluster: Cluster, namespace: str, num_groups: int, old: Set[str] = frozenset()) -> None:
    """Wait for so many ready groups of each role and no other pods, none with a uid in `old`."""

    def probe() -> bool:
        found = cluster.list("pods", f"{LABEL},headrace.dev/role", namespace)
        resource = cluster.get(headrace.KIND, NAME, namespace)
        return (
            len(found) == 2 * num_groups
            and not old & {pod["metadata"]["uid"] for pod in found}
            and resource is not None
            and headrace.is_ready(resource)
        )

    wait_for(f"{num_groups} groups of each role", probe, timeout_seconds=300)
