"""Where things live on disk. Everything is below one cache folder outside the repository.

CACHE/bin/controlplane-KEY/       the built binary and a symlink per component, kept by hash of the Go module
CACHE/bin/{kwok,kueue,helm}-*/    tools, built or unpacked when first asked for
CACHE/rootfs-KEY/                 debootstrap's output, the ground of every image
CACHE/registry/                   blobs of the local registry
CACHE/cluster/                    the cluster: pki, configuration, etcd, logs, pid files, one folder per node
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[3]
CONTROLPLANE_SOURCE = PROJECT_ROOT / "e2e" / "cluster" / "controlplane"

# One cluster fits on a machine (its addresses are fixed), so these two are not below the cache folder.
COMMAND_LOCK = Path("/run/headrace-cluster.lock")
OWNER_RECORD = Path("/run/headrace-cluster.owner")


def default_cache() -> Path:
    """`$HEADRACE_CACHE`, or `~/.cache/headrace`."""
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace").resolve()


@dataclass(frozen=True)
class Layout:
    """Paths below one cache folder."""

    cache: Path

    @property
    def bin(self) -> Path:
        return self.cache / "bin"

    @property
    def registry(self) -> Path:
        return self.cache / "registry"

    @property
    def scratch(self) -> Path:
        """Of the command that runs."""
        return self.cache / "tmp"

    @property
    def cluster(self) -> Path:
        return self.cache / "cluster"

    @property
    def run(self) -> Path:
        """One JSON record per daemon: its process and the configuration it was started with."""
        return self.cluster / "run"

    @property
    def logs(self) -> Path:
        return self.cluster / "logs"

    @property
    def config(self) -> Path:
        return self.cluster / "config"

    @property
    def registry_config(self) -> Path:
        return self.config / "registry.yaml"

    @property
    def pki(self) -> Path:
        return self.cluster / "pki"

    @property
    def etcd(self) -> Path:
        return self.cluster / "etcd"

    @property
    def pod_addresses(self) -> Path:
        """The CNI's record of which pod has which address; shared by the nodes, so addresses are unique."""
        return self.cluster / "pod-addresses"

    @property
    def kubeconfig(self) -> Path:
        return self.cluster / "kubeconfig"

    def node(self, node: str) -> NodeLayout:
        return NodeLayout(self.cluster / "nodes" / node)


@dataclass(frozen=True)
class NodeLayout:
    """Paths of one node."""

    root: Path

    @property
    def containerd_root(self) -> Path:
        """Images and snapshots: kept through `down`, and through `--wipe`."""
        return self.root / "containerd"

    @property
    def containerd_state(self) -> Path:
        """What belongs to running containers: gone after `down`."""
        return self.root / "containerd-state"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def pod_logs(self) -> Path:
        return self.root / "pod-logs"
