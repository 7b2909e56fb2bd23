"""Builders of nodes with room, for tests of capacity and placement."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_operator.capacity import GroupShape, Room
from headrace_operator.scheduling import HOSTNAME, Node, PodShape, Taint

GPU = "nvidia.com/gpu"
RACK = "nvidia.com/gpu.clique"


def room(name: str, free: Mapping[str, int], tainted: bool = False, **labels: str) -> Room:
    taints = (Taint("reserved", "", "NoSchedule"),) if tainted else ()
    return Room(Node(name, {HOSTNAME: name, **labels}, taints, free), free)


def gpus(count: int) -> dict[str, int]:
    """Free GPUs, and more than enough of the rest."""
    return {GPU: count * 1000, "cpu": 64000, "pods": 110000}


def rack(name: str, *free_gpus: int) -> list[Room]:
    """One node for each number, with so many free GPUs."""
    return [room(f"{name}-{i}", gpus(count), **{RACK: name}) for i, count in enumerate(free_gpus)]


def group(num_pods: int, gpus_per_pod: int, cpus_per_pod: int = 0) -> GroupShape:
    cpu = (("cpu", cpus_per_pod * 1000),) if cpus_per_pod else ()
    return GroupShape(PodShape((*cpu, (GPU, gpus_per_pod * 1000), ("pods", 1000))), num_pods)
