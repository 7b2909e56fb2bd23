"""Real nodes: each its own containerd and kubelet in one cgroup tree, on an address of its own."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

from . import cgroups, mounts
from .addresses import CLUSTER_DOMAIN, DNS_SERVICE_IP, REGISTRY, REGISTRY_URL, node_ip
from .console import wait_until
from .daemons import Daemon, Daemons
from .files import write_if_changed
from .layout import Layout

NODE_LABELS = "headrace.dev/node-kind=real"  # pretended nodes carry `kwok`
MAX_PODS = 110


def containerd_config(layout: Layout, node: str, pause_image: str) -> str:
    """TOML for containerd 1.6; the CNI folders are shared by all nodes, everything else is the node's own."""
    paths = layout.node(node)
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{paths.containerd_root}"
state = "{paths.containerd_state}"
oom_score = 0
[grpc]
  address = "{paths.containerd_socket}"
[{cri}]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.config / "cni"}"
  [{cri}.registry]
    config_path = "{layout.config / "registries"}"
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    discard_unpacked_layers = true
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def registry_hosts() -> str:
    """How containerd reaches the local registry: plain HTTP."""
    return f'server = "{REGISTRY_URL}"\n[host."{REGISTRY_URL}"]\n  capabilities = ["pull", "resolve"]\n'


def kubelet_config(layout: Layout, node: str) -> dict[str, object]:
    """A KubeletConfiguration. Pods may take the whole machine: nothing is reserved, nothing evicted."""
    paths, pki = layout.node(node), layout.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.path_of(node),
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},  # of those with a certificate: the API server
        "address": node_ip(node),
        "port": 10250,
        "healthzBindAddress": node_ip(node),
        "healthzPort": 10248,
        "tlsCertFile": str(pki / f"{node}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node}.key"),
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(layout.config / "resolv.conf"),
        "maxPods": MAX_PODS,
        # A memory threshold makes the eviction manager fail on machines whose disk it cannot identify.
        "evictionHard": {},
        "imageGCHighThresholdPercent": 100,  # how full the disk is does not matter
        "imageMaximumGCAge": "2h",  # since a container last used it; the registry has it still, or makes it again
        "localStorageCapacityIsolation": False,
        "podLogsDir": str(paths.pod_logs),
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 10,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "syncFrequency": "10s",
    }


def write_shared_config(layout: Layout) -> None:
    """Configuration that all nodes read."""
    write_if_changed(layout.config / "registries" / REGISTRY / "hosts.toml", registry_hosts())
    write_if_changed(layout.config / "resolv.conf", "")  # pods ask the cluster's DNS only


def containerd(layout: Layout, node: str, pause_image: str) -> Daemon:
    config = layout.node(node).root / "containerd.toml"
    write_if_changed(config, containerd_config(layout, node, pause_image))
    return Daemon(f"containerd-{node}", ["containerd", "--config", config], [config], cgroups.whole_node(node))


def kubelet(binaries: Path, layout: Layout, node: str) -> Daemon:
    paths, config = layout.node(node), layout.node(node).root / "kubelet.yaml"
    write_if_changed(config, json.dumps(kubelet_config(layout, node), indent=1))
    flags = [
        f"--config={config}",
        f"--kubeconfig={layout.pki / node}.kubeconfig",
        f"--hostname-override={node}",
        f"--root-dir={paths.kubelet}",
        f"--node-ip={node_ip(node)}",
        f"--node-labels={NODE_LABELS}",
    ]
    certificates = [layout.pki / "ca.crt", layout.pki / f"{node}.crt"]
    return Daemon(f"kubelet-{node}", [binaries / "kubelet", *flags], [config, *certificates], cgroups.whole_node(node))


def start(binaries: Path, layout: Layout, daemons: Daemons, node: str, pause_image: str) -> bool:
    """Starts what of the node is not running; returns whether the kubelet was started.

    The kubelet registers the node once the API server answers."""
    paths = layout.node(node)
    for folder in (paths.kubelet, paths.pod_logs):
        folder.mkdir(parents=True, exist_ok=True)
    cgroups.create(node)
    if daemons.start(containerd(layout, node, pause_image)):
        wait_until(
            f"containerd of {node} answers",
            lambda: _accepts(paths.containerd_socket),
            timeout_seconds=60,
            log=daemons.log(f"containerd-{node}"),
        )
    return daemons.start(kubelet(binaries, layout, node))


def _accepts(address: Path) -> bool:
    """Whether somebody listens: a killed containerd leaves its socket file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(address)) == 0


def kill(daemons: Daemons, node: str) -> None:
    """A power cut: kubelet, containerd and every container die at the same instant."""
    cgroups.kill(node)
    for name in (f"kubelet-{node}", f"containerd-{node}"):
        daemons.forget(name)


def sweep(layout: Layout, node: str) -> None:
    """Takes away what a dead node left behind, other than its images."""
    paths = layout.node(node)
    mounts.unmount_below(paths.root)
    shutil.rmtree(paths.containerd_state, ignore_errors=True)
    for left_over in paths.root.glob("containerd.sock*"):
        left_over.unlink()


def wipe(layout: Layout, node: str) -> None:
    """Forgets the node's pods; its images stay."""
    paths = layout.node(node)
    for folder in (paths.kubelet, paths.pod_logs):
        shutil.rmtree(folder, ignore_errors=True)
