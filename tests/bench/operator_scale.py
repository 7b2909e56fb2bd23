"""How fast the operator makes and removes pods, beside the built-in Deployment controller on the same cluster.

Pods go to pretended nodes (kwok), where they are Ready at once, so what is measured is control: the operator or the
Deployment's controllers, the scheduler and the API server. Both make as many of the same engine pods; Kubernetes' own
work on a pod grows with what is in it, and --bare measures the Deployments with pods of one container and nothing else:

  one     one DisaggDeployment of 250 groups of 4 pods, beside one Deployment of 1,000 replicas
  many    100 DisaggDeployments of 10 pods (2 prefill groups of 1, 2 decode groups of 4), beside 100 Deployments of 10

They take turns, repetition by repetition. Times run from just before `kubectl apply` (or `delete`) to the event that
shows the last pod. Meanwhile the operator's own metrics give the cost of its passes. Then, once each, so many
deployments of 2 pods as --growth says, to see how what they cost grows, and what is written once all are Ready.

Runs on the cluster that KUBECONFIG names, with kwok nodes labelled headrace.dev/node-kind=kwok, or on the one-machine
cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.onemachine.kwok import SELECTOR
from e2e.support import headrace
from e2e.support.cluster import REPOSITORY, Cluster, discover
from tests.bench.growth import growth_table
from tests.bench.operator_steady import OPERATOR_LABELS, OPERATOR_METRICS_PORT
from tests.bench.podwatch import PodWatch
from tests.bench.prometheus import Samples, samples_of
from tests.bench.report import Cell, Results, machine, table

from headrace_operator import names
from headrace_operator.decide import Defaults
from headrace_operator.manifests import DisaggDeployment
from headrace_operator.preview import preview

OURS, PEER = "headrace", "Deployment"
NAMESPACE = f"operator-bench-{os.getpid()}"  # what an interrupted run left is not counted
LABEL = "operator-bench"
LIMIT_SECONDS = 300.0
LEASE_SECONDS = 60.0
STEADY_SECONDS = 10.0
WRITES = ("create", "apply", "apply_status", "patch", "delete")
NUM_NODES = 72
_KEY, _, _VALUE = SELECTOR.partition("=")
POD_SPEC = {
    "nodeSelector": {_KEY: _VALUE},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
}


@dataclass(frozen=True)
class Shape:
    """What is made: `num_objects` resources of `num_pods` pods in all."""

    name: str
    num_objects: int
    num_pods: int


SHAPES = {"one": Shape("one", 1, 1000), "many": Shape("many", 100, 1000)}


def growth_shape(num_objects: int) -> Shape:
    """So many of the smallest deployments that have both roles."""
    return Shape(f"growth-{num_objects}", num_objects, 2 * num_objects)


@dataclass(frozen=True)
class Times:
    """Seconds until all pods existed, were Ready, and (from the deletion on) were gone."""

    created: float
    ready: float
    deleted: float


def deployments(shape: Shape, is_bare: bool = False) -> list[dict[str, Any]]:
    """The peer: plain Deployments, of the engine pods that `disagg_deployments` make or of bare ones."""
    replicas = shape.num_pods // shape.num_objects
    bare = {"metadata": {}, "spec": {**POD_SPEC, "containers": [{"name": "engine", "image": "none:1"}]}}
    template = bare if is_bare else engine_pod(shape)
    labels = {**template["metadata"].get("labels", {}), LABEL: shape.name}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"peer-{number}", "labels": {LABEL: shape.name}},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {LABEL: shape.name, "number": str(number)}},
                "template": {
                    **template,
                    "metadata": {**template["metadata"], "labels": {**labels, "number": str(number)}},
                },
            },
        }
        for number in range(shape.num_objects)
    ]


def engine_pod(shape: Shape) -> dict[str, Any]:
    """The template of a pod like the last of the first of ours, but for what makes it ours or tells it from others."""
    made = preview(DisaggDeployment.from_manifest(disagg_deployments(shape)[0]), Defaults("none:1", "none:1"))
    pod = [body for body in made if body["kind"] == "Pod"][-1]
    of_ours = ("hostname", "subdomain", "restartPolicy", "readinessGates")
    spec = {field: value for field, value in pod["spec"].items() if field not in of_ours}
    labels = {label: value for label, value in pod["metadata"]["labels"].items() if value != names.MANAGER}
    del labels[names.LABEL_GROUP]  # by which pods of a group are spread
    return {"metadata": {"labels": labels, "annotations": pod["metadata"]["annotations"]}, "spec": spec}


def disagg_deployments(shape: Shape) -> list[dict[str, Any]]:
    """Ours, with the same pods in groups and no router pods."""
    template = {"labels": {LABEL: shape.name}, "podSpec": POD_SPEC}
    four = {"data": 4, "dataLocal": 1, "expert": True}
    if shape.num_pods == 2 * shape.num_objects:
        roles = [{"name": name, "replicas": 1, "template": template} for name in ("prefill", "decode")]
    elif shape.num_objects == 1:
        roles = [{"name": "unified", "replicas": shape.num_pods // 4, "parallelism": four, "template": template}]
    else:
        roles = [
            {"name": "prefill", "replicas": 2, "template": template},
            {"name": "decode", "replicas": 2, "parallelism": four, "template": template},
        ]
    return [
        {
            "apiVersion": "headrace.dev/v1alpha1",
            "kind": "DisaggDeployment",
            "metadata": {"name": f"ours-{number}", "labels": {LABEL: shape.name}},
            "spec": {
                "model": {"name": "tiny", "source": {"tiny": {"family": "v4"}}},
                "engine": {"image": "none:1"},
                "router": {"replicas": 0},
                "drainTimeoutSeconds": 0,
                "roles": roles,
            },
        }
        for number in range(shape.num_objects)
    ]


def make(cluster: Cluster, pods: PodWatch, shape: Shape, bodies: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds until all pods existed, and until all were Ready."""
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    arguments = ("apply", "--server-side", "-n", NAMESPACE, "-f", "-")
    began = time.monotonic()
    cluster.kubectl(*arguments, stdin=manifest, timeout_seconds=LIMIT_SECONDS)
    created = pods.wait_count(shape.num_pods, LIMIT_SECONDS) - began
    return created, pods.wait_ready(shape.num_pods, LIMIT_SECONDS) - began


def remove(cluster: Cluster, pods: PodWatch, kind: str, shape: Shape) -> float:
    """Seconds until all pods were gone."""
    began = time.monotonic()
    plural = kind.lower() if kind == PEER else headrace.KIND
    arguments = ("delete", plural, "-n", NAMESPACE, "-l", f"{LABEL}={shape.name}", "--wait=false")
    cluster.kubectl(*arguments, timeout_seconds=LIMIT_SECONDS)
    return pods.wait_count(0, LIMIT_SECONDS) - began


def measure(cluster: Cluster, kind: str, shape: Shape, bodies: list[dict[str, Any]]) -> Times:
    """Make them all, wait until every pod is Ready, delete them all."""
    with PodWatch(cluster, NAMESPACE, f"{LABEL}={shape.name}") as pods:
        created, ready = make(cluster, pods, shape, bodies)
        return Times(created, ready, remove(cluster, pods, kind, shape))


def measure_growth(cluster: Cluster, shape: Shape) -> dict[str, float]:
    """What that many deployments cost, beside as many Deployments."""
    peer = measure(cluster, PEER, shape, deployments(shape))
    before = operator_samples(cluster)
    with PodWatch(cluster, NAMESPACE, f"{LABEL}={shape.name}") as pods:
        _, ready = make(cluster, pods, shape, disagg_deployments(shape))
        made = settled_samples(cluster)
        time.sleep(STEADY_SECONDS)
        num_writes = writes(operator_samples(cluster) - made)
        deleted = remove(cluster, pods, OURS, shape)
    return {
        "pods/s until Ready": shape.num_pods / ready,
        f"pods/s until Ready ({PEER})": shape.num_pods / peer.ready,
        "pods/s until gone": shape.num_pods / deleted,
        f"pods/s until gone ({PEER})": shape.num_pods / peer.deleted,
        **costs(before, made),
        f"writes in {STEADY_SECONDS:.0f} s once Ready": num_writes,
    }


def writes(spent: Samples) -> float:
    """Requests that could change something, but for the lease's."""
    name = "headrace_operator_api_calls_total"
    return spent.total(name, within={"verb": WRITES}, without={"kind": "Lease"})


def settled_samples(cluster: Cluster) -> Samples:
    """The operator's metrics once it has stopped writing."""
    deadline = time.monotonic() + LIMIT_SECONDS
    before = operator_samples(cluster)
    while time.monotonic() < deadline:
        time.sleep(2.0)
        now = operator_samples(cluster)
        if not writes(now - before):
            return now
        before = now
    raise TimeoutError(f"the operator still writes after {LIMIT_SECONDS:.0f} s")


def operator_samples(cluster: Cluster) -> Samples:
    """The metrics of the operator that works; one that has just been installed waits for its predecessor's lease."""
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        for pod in cluster.list("pods", OPERATOR_LABELS, headrace.OPERATOR_NAMESPACE):
            where = f"{headrace.OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:{OPERATOR_METRICS_PORT}"
            samples = samples_of(cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{where}/proxy/metrics"))
            if samples.total("headrace_operator_is_leader"):
                return samples
        time.sleep(1.0)
    raise SystemExit("no operator works in this cluster")


def costs(before: Samples, after: Samples) -> dict[str, float]:
    """What the operator's passes cost between two looks at its metrics."""
    spent = after - before
    passes = spent.total("headrace_operator_reconcile_duration_seconds_count") or 1.0
    calls = spent.total("headrace_operator_api_calls_total", without={"kind": "Lease"})
    return {
        "passes": passes,
        "pass p50 (ms)": 1000 * spent.quantile("headrace_operator_reconcile_duration_seconds", 0.5),
        "pass p99 (ms)": 1000 * spent.quantile("headrace_operator_reconcile_duration_seconds", 0.99),
        "queue age p99 (ms)": 1000 * spent.quantile("headrace_operator_queue_duration_seconds", 0.99),
        "requests per pass": calls / passes,
        "processor (s)": spent.total("process_cpu_seconds_total"),
        "memory (MiB)": after.total("process_resident_memory_bytes") / 2**20,
    }


@contextmanager
def prepared() -> Iterator[Cluster]:
    """The cluster with the operator, pretended nodes and an empty namespace; what was made for it goes at the end."""
    cluster = discover()
    headrace.install(cluster)
    has_nodes = bool(cluster.list("nodes", SELECTOR))
    if not has_nodes and not cluster.is_one_machine:
        raise SystemExit(f"this cluster has no pretended nodes: it needs some with the label {SELECTOR}")
    if not has_nodes:
        _kwok("up", str(NUM_NODES))
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        if not has_nodes:
            _kwok("down")


def _kwok(*arguments: str) -> None:
    script = str(REPOSITORY / "e2e/cluster/cluster.py")
    subprocess.run([sys.executable, script, "kwok", *arguments], check=True, stdout=subprocess.PIPE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.operator_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="one,many", help="which of one, many (default: %(default)s)")
    parser.add_argument("--growth", default="10,100,1000", help="numbers of deployments (default: %(default)s)")
    parser.add_argument("--bare", action="store_true", help="Deployments of pods with one container and nothing else")
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("bench-results/operator-scale.json"))
    arguments = parser.parse_args()
    shapes = [SHAPES[name] for name in arguments.shapes.split(",") if name]
    numbers = [int(number) for number in arguments.growth.split(",") if number]
    results, spent, grown = Results(), [], {}
    with prepared() as cluster:
        for shape in [shape for shape in shapes for _ in range(arguments.repetitions)]:
            for server, bodies in ((PEER, deployments(shape, arguments.bare)), (OURS, disagg_deployments(shape))):
                before = operator_samples(cluster)
                times = measure(cluster, server, shape, bodies)
                print(f"{shape.name} {server}: {asdict(times)}", file=sys.stderr, flush=True)
                for what, seconds in asdict(times).items():
                    results.add(Cell(f"{shape.name}: {what}", "s", higher_is_better=False), server, seconds)
                if server == OURS:
                    spent.append({"shape": shape.name, **costs(before, operator_samples(cluster))})
        for number in numbers:
            grown[number] = measure_growth(cluster, growth_shape(number))
            print(f"{number} deployments: {grown[number]}", file=sys.stderr, flush=True)
    report(results, spent, grown, arguments.output, arguments.bare)


def report(
    results: Results,
    spent: list[Mapping[str, Any]],
    grown: Mapping[int, Mapping[str, float]],
    output: Path,
    is_bare: bool,
) -> None:
    """The tables on stdout, everything into the file."""
    print(table(results, [OURS, PEER], PEER))
    own = Results()
    for entry in spent:
        for what, value in entry.items():
            if what != "shape":
                own.add(Cell(f"{entry['shape']}: {what}", "", higher_is_better=False), "operator", float(value))
    print()
    print(table(own, ["operator"], None))
    if grown:
        print()
        print(growth_table(grown, "deployments"))
    values = [{"cell": cell, "server": server, "values": v} for (cell, server), v in results.values.items()]
    output.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "is_bare": is_bare, "times": values, "operator": spent, "growth": grown}
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
