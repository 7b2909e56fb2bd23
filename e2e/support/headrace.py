"""Headrace on a cluster: install the chart, apply a DisaggDeployment, wait until it is Ready, ask it."""

from __future__ import annotations

import fcntl
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from e2e.support.cluster import REPOSITORY, Cluster, discover
from e2e.support.progress import wait_for

OPERATOR_NAMESPACE = "headrace-system"
RELEASE = "headrace"
KIND = "disaggdeployment.headrace.dev"


def installed() -> Cluster:
    """The cluster with the chart installed from this tree; test processes that come at the same time do it in turn."""
    with Path(__file__).open() as lock:  # any file that all of them see
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = discover()
        install(cluster)
    return cluster


def install(cluster: Cluster) -> None:
    """Install or upgrade the chart and wait until the operator runs; says what its pods say if it does not."""
    # Helm leaves CRDs alone on upgrade, so they are applied first, as the README tells users to.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
    images = f"operator.image={cluster.operator_image},engine.image={cluster.engine_image}"
    chart = str(REPOSITORY / "charts" / "headrace")
    where = ["--namespace", OPERATOR_NAMESPACE, "--create-namespace"]
    _clear_interrupted_install(cluster)
    try:
        cluster.helm("upgrade", "--install", RELEASE, chart, *where, "--skip-crds", "--set", images, "--wait",
                     "--timeout", "4m")  # fmt: skip
    except RuntimeError as error:
        pods = cluster.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "wide")
        names = [pod["metadata"]["name"] for pod in cluster.list("pods", namespace=OPERATOR_NAMESPACE)]
        logs = "\n".join(f"--- {name}\n{cluster.logs(name, OPERATOR_NAMESPACE)}" for name in names)
        raise RuntimeError(f"{error}\n{pods}\n{logs}") from error


def _clear_interrupted_install(cluster: Cluster) -> None:
    """An install that was killed half way blocks every later one ("another operation is in progress"): remove it.

    The chart keeps its CRDs on uninstall, so no DisaggDeployment is lost.
    """
    releases = json.loads(cluster.helm("list", "--namespace", OPERATOR_NAMESPACE, "--pending", "--output", "json"))
    if any(release["name"] == RELEASE for release in releases):
        cluster.helm("uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "2m")


def example(name: str) -> dict[str, Any]:
    """A DisaggDeployment of docs/examples, parsed."""
    return yaml.safe_load((REPOSITORY / "docs" / "examples" / f"{name}.yaml").read_text())


def condition(resource: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for entry in resource.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return entry
    return {}


def is_ready(resource: Mapping[str, Any]) -> bool:
    """Ready for the generation that was last written, not for an older one."""
    entry = condition(resource, "Ready")
    generation = resource["metadata"]["generation"]
    return entry.get("status") == "True" and entry.get("observedGeneration") == generation


def describe(resource: Mapping[str, Any] | None) -> str:
    if resource is None:
        return "the resource does not exist"
    entry = condition(resource, "Ready")
    roles = ", ".join(
        f"{role['name']} {role.get('readyGroups', 0)}/{role.get('groups', 0)}"
        for role in resource.get("status", {}).get("roles", [])
    )
    return (
        f"Ready={entry.get('status', 'Unknown')} {entry.get('reason', '')} {entry.get('message', '')} [{roles}]".strip()
    )


def wait_ready(cluster: Cluster, name: str, namespace: str = "default", timeout_seconds: float = 300) -> dict[str, Any]:
    """Wait until the deployment is Ready, telling why it is not yet every 10 s."""
    seen: dict[str, Any] = {}

    def probe() -> dict[str, Any] | None:
        resource = cluster.get(KIND, name, namespace)
        seen["resource"] = resource
        return resource if resource and is_ready(resource) else None

    return wait_for(
        f"{namespace}/{name} to be Ready",
        probe,
        timeout_seconds=timeout_seconds,
        report=lambda: describe(seen["resource"]),
    )


def wait_gone(cluster: Cluster, name: str, namespace: str = "default", timeout_seconds: float = 90) -> None:
    """Wait until nothing that carries the deployment's label is left."""
    selector = f"headrace.dev/deployment={name}"
    kinds = (
        "pods,services,deployments,replicasets,controllerrevisions,serviceaccounts,roles,rolebindings,endpointslices"
    )

    def left() -> list[str]:
        found = cluster.kubectl("get", kinds, "-n", namespace, "-l", selector, "-o", "name").split()
        return [*found, *([name] if cluster.get(KIND, name, namespace) else [])]

    wait_for(
        f"{name} to leave nothing", lambda: not left(), timeout_seconds=timeout_seconds, report=lambda: str(left())
    )


def post(url: str, body: Mapping[str, Any] | bytes, timeout_seconds: float = 60) -> tuple[int, dict[str, Any]]:
    """POST JSON; the status and the JSON answer, whatever the status."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait_answer(url: str, body: Mapping[str, Any], timeout_seconds: float = 60) -> dict[str, Any]:
    """Ask until the answer is a 200: right after Ready, addresses may still be on their way to the node's proxy."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            status, answer = post(url, body)
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            status, answer = 0, {"error": str(error)}
        if status == 200:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: no answer within {timeout_seconds:.0f} s, last: {status} {answer}")
        time.sleep(0.3)
