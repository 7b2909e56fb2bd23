"""Pretended nodes with GPUs, run by kwok, to see how many nodes would be used; no container runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .addresses import KWOK, KWOK_NETWORK, KWOK_NODE_IP
from .console import ClusterError, wait_until
from .daemons import Daemon, Daemons
from .kubectl import Kubectl, is_node_ready
from .layout import Layout

SELECTOR = "headrace.dev/node-kind=kwok"
NODES_PER_CLIQUE = 18  # one NVLink domain: a rack of 18 machines
GPUS_PER_NODE = 4
MAX_NODES = 2000
LEASE_SECONDS = 20


def node(index: int) -> dict[str, Any]:
    """One pretended machine. The taint keeps pods that do not ask for it on real nodes."""
    name = f"kwok-{index}"
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(GPUS_PER_NODE)}
    key, _, value = SELECTOR.partition("=")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                key: value,
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "nvidia.com/gpu.clique": f"clique-{index // NODES_PER_CLIQUE}",
            },
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": resources, "capacity": resources},
    }


def daemon(folder: Path, layout: Layout) -> Daemon:
    flags = [
        f"--config={folder / 'stages.yaml'}",
        f"--kubeconfig={layout.pki / 'kwok.kubeconfig'}",
        f"--manage-nodes-with-label-selector={SELECTOR}",
        f"--cidr={KWOK_NETWORK}",
        f"--node-ip={KWOK_NODE_IP}",
        f"--node-lease-duration-seconds={LEASE_SECONDS}",
        f"--server-address={KWOK.ip}:{KWOK.port}",
    ]
    return Daemon("kwok", [folder / "kwok", *flags], [folder / "stages.yaml"])


def up(count: int, folder: Path, layout: Layout, daemons: Daemons, kubectl: Kubectl) -> None:
    """Makes exactly `count` pretended nodes and waits until they are Ready."""
    if not 1 <= count <= MAX_NODES:
        raise ClusterError(f"the number of pretended nodes must be 1 to {MAX_NODES}, not {count}")
    daemons.start(daemon(folder, layout))
    wanted = [node(index) for index in range(count)]
    names = {item["metadata"]["name"] for item in wanted}
    surplus = [n["metadata"]["name"] for n in kubectl.nodes(SELECTOR) if n["metadata"]["name"] not in names]
    if surplus:
        kubectl("delete", "node", *surplus, "--wait=false", what="removing surplus pretended nodes")
    kubectl.apply(wanted, "making pretended nodes")
    wait_until(
        f"{count} pretended nodes are Ready",
        lambda: sum(map(is_node_ready, kubectl.nodes(SELECTOR))) == count,
        timeout_seconds=60 + count / 5,
        log=daemons.log("kwok"),
        every_seconds=0.5,
    )


def down(daemons: Daemons, kubectl: Kubectl) -> None:
    """Removes the pretended nodes; their pods go with them."""
    kubectl("delete", "node", f"--selector={SELECTOR}", "--wait=false", what="removing pretended nodes")
    daemons.stop("kwok")
