"""What the operator costs while nothing changes: writes to the API server per minute, and its memory.

Counts come from the API server itself (`apiserver_request_total`), so a write that changes nothing counts too. The
metric does not say who wrote: run this on a cluster where nothing else happens. Heartbeats of nodes and leader
elections, which every cluster has, are left out.

Uses kubectl and KUBECONFIG; `make cluster-up` and the chart come first.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.bench.report import Cell, Results, machine, table

WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
HEARTBEATS = {"leases", "nodes", "nodes/status"}
OPERATOR_LABELS = "app.kubernetes.io/name=headrace-operator"
OPERATOR_METRICS_PORT = 9090
KUBECTL_LIMIT_SECONDS = 60
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def writes_by_resource(metrics: str) -> Counter[str]:
    """Write requests so far, by resource, from the API server's metrics in text form; heartbeats left out."""
    counts: Counter[str] = Counter()
    for line in metrics.splitlines():
        if not line.startswith("apiserver_request_total{"):
            continue
        labels = dict(_LABEL.findall(line))
        resource = "/".join(filter(None, (labels["resource"], labels["subresource"])))
        if labels["verb"] in WRITES and resource not in HEARTBEATS:
            counts[resource] += int(float(line.rsplit(" ", 1)[1]))
    return counts


def resident_bytes(metrics: str) -> float:
    """Resident memory as a process's own metrics tell it. Raises ValueError if they do not."""
    found = re.search(r"^process_resident_memory_bytes (\S+)$", metrics, re.MULTILINE)
    if not found:
        raise ValueError("no process_resident_memory_bytes among the metrics")
    return float(found.group(1))


def _kubectl(kubectl: list[str], *arguments: str) -> str:
    done = subprocess.run([*kubectl, *arguments], capture_output=True, text=True, timeout=KUBECTL_LIMIT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{shlex.join([*kubectl, *arguments])}: {done.stderr.strip()}")
    return done.stdout


def _operator_pod(kubectl: list[str]) -> dict[str, Any]:
    pods = json.loads(_kubectl(kubectl, "get", "pods", "-A", "-l", OPERATOR_LABELS, "-o", "json"))["items"]
    running: list[dict[str, Any]] = [pod for pod in pods if pod["status"]["phase"] == "Running"]
    if not running:
        raise SystemExit(f"no operator runs in this cluster (pods with {OPERATOR_LABELS}); install the chart first")
    return running[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.operator_steady", description=__doc__)
    parser.add_argument("--seconds", type=int, default=180, help="how long to watch")
    parser.add_argument("--kubectl", default="kubectl", help="how to call kubectl")
    parser.add_argument("--output", type=Path, default=Path("bench-results/operator.json"))
    arguments = parser.parse_args()
    kubectl = shlex.split(arguments.kubectl)

    started = _operator_pod(kubectl)["metadata"]["uid"]
    deployments = json.loads(_kubectl(kubectl, "get", "disaggdeployments", "-A", "-o", "json"))["items"]
    print(f"watching {arguments.seconds} s, {len(deployments)} deployments", file=sys.stderr, flush=True)
    before = writes_by_resource(_kubectl(kubectl, "get", "--raw", "/metrics"))
    time.sleep(arguments.seconds)
    written = writes_by_resource(_kubectl(kubectl, "get", "--raw", "/metrics")) - before
    pod = _operator_pod(kubectl)["metadata"]
    if pod["uid"] != started:
        raise SystemExit("the operator was replaced meanwhile: that is no steady state")
    metrics_path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}:{OPERATOR_METRICS_PORT}/proxy/metrics"
    memory = resident_bytes(_kubectl(kubectl, "get", "--raw", metrics_path))

    results = Results()
    writes = Cell("API writes", "per minute", higher_is_better=False)
    results.add(writes, "operator", sum(written.values()) * 60 / arguments.seconds)
    results.add(Cell("memory (resident)", "MiB", higher_is_better=False), "operator", memory / 2**20)
    print(table(results, ["operator"], None))
    report = {
        "machine": machine(),
        "seconds": arguments.seconds,
        "deployments": len(deployments),
        "writes": dict(written),
        "resident_bytes": memory,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for resource, count in written.most_common():
        print(f"{count} writes of {resource}", file=sys.stderr)


if __name__ == "__main__":
    main()
