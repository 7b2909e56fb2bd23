"""How fast the operator makes and removes pods, beside the built-in Deployment controller on the same cluster.

Pods go to pretended nodes (kwok), where they are Ready at once, so what is measured is control: the operator or the
Deployment's controllers, the scheduler and the API server. Both make the same number of pods with the same container:

  one     one DisaggDeployment of 250 groups of 4 pods, beside one Deployment of 1,000 replicas
  many    100 DisaggDeployments of 10 pods (2 prefill groups of 1, 2 decode groups of 4), beside 100 Deployments of 10

They take turns, repetition by repetition. Times run from just before `kubectl apply` (or `delete`) to the event that
shows the last pod. Meanwhile the operator's own metrics give the cost of its passes. Runs on the cluster that
KUBECONFIG names, with kwok nodes labelled headrace.dev/node-kind=kwok, or on the one-machine cluster.
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
from tests.bench.operator_steady import OPERATOR_LABELS, OPERATOR_METRICS_PORT
from tests.bench.podwatch import PodWatch
from tests.bench.prometheus import Samples, samples_of
from tests.bench.report import Cell, Results, machine, table

OURS, PEER = "headrace", "Deployment"
NAMESPACE = f"operator-bench-{os.getpid()}"  # what an interrupted run left is not counted
LABEL = "operator-bench"
LIMIT_SECONDS = 300.0
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


@dataclass(frozen=True)
class Times:
    """Seconds until all pods existed, were Ready, and (from the deletion on) were gone."""

    created: float
    ready: float
    deleted: float


def deployments(shape: Shape) -> list[dict[str, Any]]:
    """The peer: plain Deployments."""
    replicas = shape.num_pods // shape.num_objects
    template = {
        "metadata": {"labels": {LABEL: shape.name}},
        "spec": {**POD_SPEC, "containers": [{"name": "engine", "image": "none:1"}]},
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"peer-{number}", "labels": {LABEL: shape.name}},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {LABEL: shape.name, "number": str(number)}},
                "template": {**template, "metadata": {"labels": {LABEL: shape.name, "number": str(number)}}},
            },
        }
        for number in range(shape.num_objects)
    ]


def disagg_deployments(shape: Shape) -> list[dict[str, Any]]:
    """Ours, with the same pods in groups and no router pods."""
    template = {"labels": {LABEL: shape.name}, "podSpec": POD_SPEC}
    four = {"data": 4, "dataLocal": 1, "expert": True}
    if shape.num_objects == 1:
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


def measure(cluster: Cluster, kind: str, shape: Shape, bodies: list[dict[str, Any]]) -> Times:
    """Make them all, wait until every pod is Ready, delete them all."""
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    with PodWatch(cluster, NAMESPACE, f"{LABEL}={shape.name}") as pods:
        began = time.monotonic()
        cluster.kubectl("apply", "--server-side", "-n", NAMESPACE, "-f", "-", stdin=manifest)
        created = pods.wait_count(shape.num_pods, LIMIT_SECONDS) - began
        ready = pods.wait_ready(shape.num_pods, LIMIT_SECONDS) - began
        began = time.monotonic()
        plural = kind.lower() if kind == PEER else headrace.KIND
        cluster.kubectl("delete", plural, "-n", NAMESPACE, "-l", f"{LABEL}={shape.name}", "--wait=false")
        deleted = pods.wait_count(0, LIMIT_SECONDS) - began
    return Times(created, ready, deleted)


def operator_samples(cluster: Cluster) -> Samples:
    """The metrics of the operator that works."""
    pods = cluster.list("pods", OPERATOR_LABELS, headrace.OPERATOR_NAMESPACE)
    for pod in pods:
        where = f"{headrace.OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:{OPERATOR_METRICS_PORT}"
        samples = samples_of(cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{where}/proxy/metrics"))
        if samples.total("headrace_operator_is_leader"):
            return samples
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
        "queue wait p99 (ms)": 1000 * spent.quantile("headrace_operator_queue_duration_seconds", 0.99),
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
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("bench-results/operator-scale.json"))
    arguments = parser.parse_args()
    shapes = [SHAPES[name] for name in arguments.shapes.split(",")]
    results, spent = Results(), []
    with prepared() as cluster:
        for shape in [shape for shape in shapes for _ in range(arguments.repetitions)]:
            for server, bodies in ((PEER, deployments(shape)), (OURS, disagg_deployments(shape))):
                before = operator_samples(cluster)
                times = measure(cluster, server, shape, bodies)
                print(f"{shape.name} {server}: {asdict(times)}", file=sys.stderr, flush=True)
                for what, seconds in asdict(times).items():
                    results.add(Cell(f"{shape.name}: {what}", "s", higher_is_better=False), server, seconds)
                if server == OURS:
                    spent.append({"shape": shape.name, **costs(before, operator_samples(cluster))})
    report(results, spent, arguments.output)


def report(results: Results, spent: list[Mapping[str, Any]], output: Path) -> None:
    """The table on stdout, everything into the file."""
    print(table(results, [OURS, PEER], PEER))
    own = Results()
    for entry in spent:
        for what, value in entry.items():
            if what != "shape":
                own.add(Cell(f"{entry['shape']}: {what}", "", higher_is_better=False), "operator", float(value))
    print()
    print(table(own, ["operator"], None))
    values = [{"cell": cell, "server": server, "values": v} for (cell, server), v in results.values.items()]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "times": values, "operator": spent}, indent=1) + "\n")


if __name__ == "__main__":
    main()
