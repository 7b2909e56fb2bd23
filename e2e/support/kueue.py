"""Kueue on the one-machine cluster: its own chart, and a manager built from the same sources."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from e2e.support.cluster import REPOSITORY, Cluster, SetupError
from e2e.support.progress import wait_for

NAMESPACE = "kueue-system"
RELEASE = "kueue"
# Of namespaces whose pods it looks at: it leaves all others alone, so that a scenario that was killed breaks no other.
NAMESPACE_LABEL = "headrace.dev/queued"
QUEUE_KINDS = "clusterqueues.kueue.x-k8s.io,resourceflavors.kueue.x-k8s.io"
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "integrations": {"frameworks": ["pod"]},
    "managedJobsNamespaceSelector": {"matchLabels": {NAMESPACE_LABEL: "true"}},
}
# The API server of this cluster has no certificate to show to others that extend its API.
EXTENSIONS = ["v1beta1.visibility.kueue.x-k8s.io", "v1beta2.visibility.kueue.x-k8s.io"]


@contextmanager
def installed(cluster: Cluster, node: str) -> Iterator[None]:
    """Kueue at work on a node, until the end; then its queues go, and the namespaces whose pods it looked at."""
    command = [sys.executable, str(REPOSITORY / "e2e" / "cluster" / "cluster.py"), "kueue"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress goes on to our stderr
    if done.returncode:
        raise SetupError(f"{' '.join(command)}: exit {done.returncode}; see above")
    made = json.loads(done.stdout)
    _remove(cluster)  # what a scenario that was killed has left
    settings = [f"--set-json={name}={json.dumps(value)}" for name, value in _values(made["image"], node).items()]
    where = ["--namespace", NAMESPACE, "--create-namespace"]
    try:
        cluster.helm("install", RELEASE, made["chart"], *where, *settings, "--wait", "--timeout", "2m")
        cluster.kubectl("delete", "apiservice", *EXTENSIONS)
        wait_for("Kueue's webhooks to answer", lambda: _answers(cluster), timeout_seconds=60)
        yield
    finally:
        _remove(cluster)


def _answers(cluster: Cluster) -> bool:
    """Whether it can be reached; it is ready a little before every node knows its address."""
    probe = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    with contextlib.suppress(RuntimeError):
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(probe))
        return True
    return False


def _values(image: str, node: str) -> Mapping[str, Any]:
    repository, _, tag = image.rpartition(":")
    return {
        "controllerManager.manager.image": {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"},
        "controllerManager.manager.podSecurityContext": {"runAsUser": 65532},
        "controllerManager.manager.resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "controllerManager.nodeSelector": {"kubernetes.io/hostname": node},
        "controllerManager.featureGates": [{"name": "VisibilityOnDemand", "enabled": False}],
        "controllerManager.readinessProbe": {"initialDelaySeconds": 1},
        "managerConfig.controllerManagerConfigYaml": json.dumps(CONFIGURATION),
    }


def _remove(cluster: Cluster) -> None:
    """Users first: nobody takes Kueue's finalizers off once it is gone."""
    cluster.kubectl("delete", "namespace", f"--selector={NAMESPACE_LABEL}", "--wait=true", "--timeout=60s")
    with contextlib.suppress(RuntimeError):  # there are no such kinds if it is not installed
        cluster.kubectl("delete", QUEUE_KINDS, "--all", "--wait=true", "--timeout=60s")
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "1m")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true", "--timeout=60s")
