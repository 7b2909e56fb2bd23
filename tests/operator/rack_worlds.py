"""Racks in small: nodes, deployments on them, and a scheduler that spreads pods as badly as it may."""

from __future__ import annotations

import random
from typing import Any

from tests.operator.racks import GPU, RACK
from tests.operator.worlds import FakeCluster, ready_status, stored

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.inventory import Inventory
from headrace_operator.scheduling import HOSTNAME, node_of, requests_of, shape_of
from headrace_operator.workqueue import Key

GPUS_PER_NODE = 4
SAME_RACK = {"group": "SameDomain"}


class Shown(Inventory):
    """An inventory that is told what the watches would tell it."""

    def __init__(self) -> None:
        super().__init__(None, lambda key: None, clock=lambda: 0.0)  # type: ignore[arg-type]
        self._listed = {"Node", "Pod"}

    def show(self, kind: str, body: dict[str, Any]) -> None:
        self._see(kind, body)

    def show_deleted(self, body: dict[str, Any]) -> None:
        self._lose("Pod", body)


class Racks:
    """Racks of nodes, the deployments on them, and a scheduler."""

    def __init__(self, nodes_per_rack: list[int], seed: int) -> None:
        self.random = random.Random(seed)
        self.inventory = Shown()
        self.nodes = {}
        self.bodies: list[dict[str, Any]] = []  # of the nodes
        for rack, count in enumerate(nodes_per_rack):
            for index in range(count):
                name = f"rack-{rack}-{index}"
                allocatable = {GPU: GPUS_PER_NODE, "pods": 20}
                labels = {HOSTNAME: name, RACK: f"rack-{rack}"}
                metadata = {"name": name, "labels": labels}
                body = {"kind": "Node", "metadata": metadata, "status": {"allocatable": allocatable}}
                self.bodies.append(body)
                self.nodes[name] = node_of(body)
                self.inventory.show("Node", body)
        self.clusters: dict[str, FakeCluster] = {}
        self.wanted: dict[str, DisaggDeployment] = {}
        self.unseen: list[dict[str, Any]] = []

    def want(self, name: str, changes: dict[str, Any]) -> None:
        self.clusters.setdefault(name, FakeCluster(uid_prefix=name))
        self.wanted[name] = stored({"metadata.name": name, **changes})

    def look(self, name: str) -> None:
        """One pass over one deployment. What it makes is shown later."""
        cluster, key = self.clusters[name], Key("default", name)
        before = dict(cluster.pods())
        decision = cluster.run(self.wanted[name], 0.0, capacity=self.inventory.capacity(key))
        assert decision.admission is not None
        self.inventory.record(key, decision.admission)
        for pod, body in before.items():
            if pod not in cluster.pods():
                self.inventory.show_deleted(body)
        self.unseen += [body for pod, body in cluster.pods().items() if pod not in before]
        cluster.make_router_ready()

    def schedule(self) -> None:
        """Show what was made, and bind it: in any order, each pod to any node that has room for it."""
        for body in self.unseen:
            self.inventory.show("Pod", body)
        self.unseen = []
        waiting = [p for c in self.clusters.values() for p in c.pods().values() if not p["spec"].get("nodeName")]
        self.random.shuffle(waiting)
        for body in waiting:
            places = [name for name in self.nodes if self.fits(body, name)]
            assert places, f"{body['metadata']['name']} was made and finds no node"
            body["spec"]["nodeName"] = self.random.choice(places)
            body["status"] = ready_status()
            self.inventory.show("Pod", body)

    def fits(self, body: dict[str, Any], node: str) -> bool:
        held = [p for c in self.clusters.values() for p in c.pods().values() if p["spec"].get("nodeName") == node]
        left = dict(self.nodes[node].allocatable)
        for pod in [*held, body]:
            for name, amount in requests_of(pod["spec"]).items():
                left[name] = left.get(name, 0) - amount
        return shape_of(body["spec"]).objection(self.nodes[node]) is None and min(left.values()) >= 0

    def settle(self, rounds: int = 60) -> None:
        """Passes in any order, until nothing changes any more."""
        num_quiet = 0
        for _ in range(rounds):
            before = self.facts()
            for name in self.random.sample(sorted(self.clusters), len(self.clusters)):
                self.look(name)
                if self.random.random() < 0.5:
                    self.schedule()
            self.schedule()
            num_quiet = num_quiet + 1 if self.facts() == before else 0
            if num_quiet == 2:
                return
        raise AssertionError("it goes on for ever")

    def facts(self) -> list[str]:
        return [p["metadata"]["uid"] for c in self.clusters.values() for p in c.pods().values()]

    def groups(self, name: str) -> dict[str, int]:
        """Ready groups by role."""
        return {role.name: role.ready_groups for role in self.clusters[name].status.roles}

    def reason(self, name: str) -> str:
        conditions = self.clusters[name].status.conditions
        return next(c.reason for c in conditions if c.type == names.PROGRESSING)

    def check_racks(self) -> None:
        """Every group is in one rack."""
        for cluster in self.clusters.values():
            racks: dict[str, set[str]] = {}
            for name, pod in cluster.pods().items():
                racks.setdefault(name.rpartition("-")[0], set()).add(self.nodes[pod["spec"]["nodeName"]].labels[RACK])
            assert all(len(found) == 1 for found in racks.values())


def spec(prefill: tuple[int, int], decode: tuple[int, int, int], placement: dict[str, Any]) -> dict[str, Any]:
    """`prefill`: groups, GPUs of each one pod; `decode`: groups, pods of each, GPUs of each pod."""
    return {
        "spec.placement": placement,
        "spec.roles.0.replicas": prefill[0],
        "spec.roles.0.parallelism": {"data": prefill[1]},
        "spec.roles.0.resources": {"gpu": prefill[1]},
        "spec.roles.1.replicas": decode[0],
        "spec.roles.1.parallelism": {"data": decode[1] * decode[2], "dataLocal": decode[2]},
        "spec.roles.1.resources": {"gpu": decode[2]},
    }
