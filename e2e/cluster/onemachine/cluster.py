"""The cluster as a whole: up, down, status, and one node's life."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import (
    addons,
    binaries,
    cgroups,
    controlplane,
    host,
    images,
    kueue,
    kwok,
    mounts,
    network,
    nodes,
    ownership,
    pki,
    pruning,
    traces,
)
from .addresses import CONTROL_PLANE_LISTENERS, KWOK, NODES, REGISTRY_LISTENER
from .children import together
from .console import ClusterError, Progress, wait_until
from .daemons import Daemons, end_sessions, orphaned_sessions
from .kubectl import Kubectl, is_node_ready
from .layout import Layout
from .registry import Registry

START_TIMEOUT_SECONDS = 120  # of a busy machine; an idle one takes 5


DAEMON_NAMES = frozenset(
    {listener.part for listener in (*CONTROL_PLANE_LISTENERS, KWOK)} | {f"containerd-{node}" for node in NODES}
)


class Cluster:
    """The one cluster of a cache folder. Its methods assume that the caller holds the command lock."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        self.layout = layout
        self.progress = progress
        self.daemons = Daemons(layout.run, layout.logs)
        self._node_started: dict[str, float] = {}  # Unix time, of nodes that this command has started

    @property
    def binaries(self) -> Path:
        return binaries.controlplane_folder(self.layout)

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.binaries / "kubectl", self.layout.kubeconfig)

    def up(self) -> None:
        """Makes the cluster run as configured: from nothing, from its remains, or from a running one that differs."""
        self._prepare()
        self._bring_up()

    def up_with_images(self) -> dict[str, str]:
        """`up` and `make_images` at the same time: the one waits for the compiler, the other for downloads."""
        self._prepare(host.MIN_FREE_FOR_IMAGES_TOO_BYTES)
        self.start_registry()
        made: list[images.Made] = []
        progress = self.progress.of_part("images")
        together(self._bring_up, lambda: made.append(images.ensure_all(self.layout, progress)))
        self._prune(made[0])
        return made[0].references()

    def make_images(self) -> dict[str, str]:
        """Makes the images that changed; needs no cluster. Returns references by name."""
        self._prepare()
        self.start_registry()
        made = images.ensure_all(self.layout, self.progress)
        self._prune(made)
        return made.references()

    def _prune(self, made: images.Made) -> None:
        """Removes old images, if the API server is there to tell what is in use."""
        if not (self.daemons.is_alive("kube-apiserver") and self.kubectl.is_ready()):
            return
        # Workloads name images for pods to come; the operator's Deployment names the engine's.
        kinds = "pods,deployments,statefulsets,daemonsets,jobs"
        objects = self.kubectl("get", kinds, "-A", "-o", "json", what="reading which images are in use")
        in_use = pruning.references_in(objects) | {f"{image.name}:{image.tag}" for image in made.all()}
        pruning.prune(self.layout, self.layout.registry_config, in_use, time.time(), self.progress)

    def _bring_up(self) -> None:
        binaries.ensure_controlplane(self.layout, self.progress)
        self._settle_remains()
        ownership.claim(self.layout)
        pki.make(self.layout.pki, self.layout.kubeconfig)
        network.up(self.layout.config / "cni", self.layout.pod_addresses)
        self.start_registry()
        nodes.write_shared_config(self.layout)
        pause_image = images.ensure_pause(self.binaries / "pause", self.layout)
        self.progress("network, registry and pause image are there; starting daemons")
        self.daemons.start(controlplane.etcd(self.binaries, self.layout))
        self.daemons.start(controlplane.apiserver(self.binaries, self.layout))
        with ThreadPoolExecutor(len(NODES)) as pool:  # the API server takes longer to start than the nodes do
            list(pool.map(lambda node: self._start_node(node, str(pause_image)), NODES))
        self._wait_for_apiserver()
        for make in (controlplane.controller_manager, controlplane.scheduler, controlplane.proxy, controlplane.coredns):
            self.daemons.start(make(self.binaries, self.layout))
        self.kubectl.apply(addons.objects(), "applying the cluster's own objects")
        self.wait_for_nodes(NODES)

    def down(self, *, wipe: bool) -> None:
        """Stops everything and removes it from the machine; caches and images stay. `wipe` also removes etcd's data,
        certificates and the nodes' pods."""
        host.require_root()
        ownership.require_not_foreign(self.layout)
        self._end_orphans()
        stopped_last = ("kube-apiserver", "etcd", "registry")
        for name in self.daemons.names():
            if name not in stopped_last and not name.endswith(NODES):
                self.daemons.stop(name, graceful_seconds=0)
        self._kill_nodes()
        for name in stopped_last:
            self.daemons.stop(name, graceful_seconds=0 if name == "kube-apiserver" else 5)
        self.progress("processes are stopped")
        self._sweep()
        if wipe:
            self._wipe()
        ownership.release()
        self.progress(
            "nothing is left on the machine" + (", no state either" if wipe else "; images and state are kept")
        )

    def status(self) -> dict[str, Any]:
        """What runs: daemons by name, nodes by name with their readiness, and how to reach it."""
        alive = {name: self.daemons.is_alive(name) for name in self.daemons.names()}
        status: dict[str, Any] = {"running": bool(alive) and all(alive.values()), "daemons": alive, "nodes": {}}
        if alive.get("kube-apiserver") and self.kubectl.is_ready():
            status["nodes"] = {n["metadata"]["name"]: is_node_ready(n) for n in self.kubectl.nodes()}
            status["running"] = status["running"] and all(status["nodes"].get(node) for node in NODES)
        return {
            **status,
            "kubeconfig": str(self.layout.kubeconfig),
            "kubectl": str(self.binaries / "kubectl"),
            "logs": str(self.layout.logs),
        }

    def start_registry(self) -> None:
        """The registry runs without the rest when images are made and no cluster is up."""
        if not self.daemons.is_alive("registry"):
            host.require_free_ports([REGISTRY_LISTENER])
        self.layout.registry.mkdir(parents=True, exist_ok=True)
        self.daemons.start(controlplane.registry(self.layout))
        ownership.claim(self.layout)
        wait_until("the registry answers", Registry().answers, timeout_seconds=30, log=self.daemons.log("registry"))

    def start_node(self, node: str) -> None:
        self._require_running()
        self._start_node(node, str(images.ensure_pause(self.binaries / "pause", self.layout)))
        self.wait_for_nodes([node])

    def kill_node(self, node: str) -> None:
        self._require_running()
        nodes.kill(self.daemons, node)

    def set_node_frozen(self, node: str, frozen: bool) -> None:
        self._require_running()
        cgroups.set_frozen(node, frozen)

    def kwok_up(self, count: int) -> None:
        self._require_running()
        kwok.up(count, binaries.ensure_kwok(self.layout, self.progress), self.layout, self.daemons, self.kubectl)

    def kwok_down(self) -> None:
        self._require_running()
        kwok.down(self.daemons, self.kubectl)

    def kueue(self) -> dict[str, str]:
        """The image of Kueue's manager, in the registry, and the folder of its chart."""
        self._require_running()
        folder = kueue.ensure(self.layout, self.progress)
        return {"image": str(kueue.ensure_image(folder, self.layout)), "chart": str(folder / "chart")}

    def wait_for_nodes(self, names: tuple[str, ...] | list[str]) -> None:
        def all_ready() -> bool:
            by_name = {n["metadata"]["name"]: n for n in self.kubectl.nodes()}
            return all(
                name in by_name and is_node_ready(by_name[name], self._node_started.get(name, 0.0)) for name in names
            )

        log = self.daemons.log(f"kubelet-{names[0]}")
        wait_until(f"{', '.join(names)} Ready", all_ready, timeout_seconds=START_TIMEOUT_SECONDS, log=log)
        self.progress(f"Ready: {', '.join(names)}")

    def _prepare(self, free_bytes_for_build: int = host.MIN_FREE_FOR_BUILD_BYTES) -> None:
        host.require_root()
        ownership.require_not_foreign(self.layout)
        self._end_orphans()
        host.install_missing_packages(self.progress)
        host.require_kernel_features()
        shutil.rmtree(self.layout.scratch, ignore_errors=True)  # of a command that was killed; the lock is ours
        is_built = self.binaries.exists()
        host.require_disk(self.layout.cache, host.MIN_FREE_BYTES if is_built else free_bytes_for_build)

    def _settle_remains(self) -> None:
        """If nothing but perhaps the registry lives, whatever is on the machine is the remains of an unclean stop."""
        alive = [name for name in self.daemons.names() if self.daemons.is_alive(name) and name != "registry"]
        if alive:
            return
        self._kill_nodes()
        self._sweep()
        listeners = [one for one in CONTROL_PLANE_LISTENERS if one != REGISTRY_LISTENER]
        host.require_free_ports(listeners)

    def _end_orphans(self) -> None:
        """Ends daemons without a record: their cache folder was deleted while they ran."""
        orphans = orphaned_sessions(DAEMON_NAMES, self.daemons.sessions())
        if orphans:
            self.progress(f"ending daemons of a cluster whose folder is gone: {', '.join(sorted(orphans.values()))}")
            end_sessions(orphans)

    def _kill_nodes(self) -> None:
        """Kills every process of every node: containers outlive a killed containerd, nothing outlives this."""
        for node in NODES:
            nodes.kill(self.daemons, node)

    def _sweep(self) -> None:
        """Removes mounts, network, cgroups and traces of a cluster whose processes are dead: ours, and that of another
        cache folder that was started last and never stopped."""
        layouts = {self.layout, Layout(ownership.owner() or self.layout.cache)}
        for layout in layouts:
            for node in NODES:
                nodes.sweep(layout, node)
            mounts.unmount_below(layout.cluster)
            shutil.rmtree(layout.pod_addresses, ignore_errors=True)
        network.down()
        cgroups.remove()
        for layout in layouts:
            traces.remove(layout.cluster)

    def _wipe(self) -> None:
        for node in NODES:
            nodes.wipe(self.layout, node)
        for folder in (self.layout.etcd, self.layout.pki, self.layout.config, self.layout.logs, self.layout.run):
            shutil.rmtree(folder, ignore_errors=True)
        self.layout.kubeconfig.unlink(missing_ok=True)

    def _start_node(self, node: str, pause_image: str) -> None:
        now = time.time()
        if nodes.start(self.binaries, self.layout, self.daemons, node, pause_image):
            self._node_started[node] = now

    def _wait_for_apiserver(self) -> None:
        log = self.daemons.log("kube-apiserver")
        wait_until("the API server is ready", self.kubectl.is_ready, timeout_seconds=START_TIMEOUT_SECONDS, log=log)
        self.progress("the API server is ready")

    def _require_running(self) -> None:
        host.require_root()
        if not self.daemons.is_alive("kube-apiserver"):
            raise ClusterError("the cluster is not running; start it with `make cluster-up`")
