"""What containerd, runc, the CNI and kubelets write outside the cluster's folder, at places that no flag moves."""

from __future__ import annotations

import shutil
from pathlib import Path

SHIM_SOCKETS = "run/containerd/s"
KUBELET_SOCKET = "var/lib/kubelet/device-plugins/kubelet.sock"
CONTAINERS = "run/containerd/runc/k8s.io"  # runc's state.json of each container
LOG_LINKS = "var/log/containers"
# Made by them when missing; removed, children first, only where nothing is inside.
FOLDERS = (
    SHIM_SOCKETS,
    CONTAINERS,
    "run/containerd/runc",
    "run/containerd",
    "run/netns",
    LOG_LINKS,
    "opt/containerd/bin",
    "opt/containerd/lib",
    "opt/containerd",
    "var/lib/kubelet/device-plugins",
    "var/lib/kubelet",
    "usr/libexec/kubernetes/kubelet-plugins/volume/exec",
    "usr/libexec/kubernetes/kubelet-plugins/volume",
    "usr/libexec/kubernetes/kubelet-plugins",
    "usr/libexec/kubernetes",
    "var/lib/cni/results",
    "var/lib/cni",
)


def remove(cluster: Path, root: Path = Path("/"), proc_net_unix: str | None = None) -> None:
    """Removes the traces of the dead cluster in the folder `cluster`; leaves what another containerd or kubelet uses.

    `proc_net_unix` is the text of /proc/net/unix, which is read if it is not given.
    """
    if proc_net_unix is None:
        proc_net_unix = Path("/proc/net/unix").read_text()
    in_use = {words[7] for words in map(str.split, proc_net_unix.splitlines()) if len(words) > 7}
    for path in (*(root / SHIM_SOCKETS).glob("*"), root / KUBELET_SOCKET):
        if path.is_socket() and str(path) not in in_use:
            path.unlink(missing_ok=True)
    for container in (root / CONTAINERS).glob("*"):
        state = container / "state.json"
        if state.exists() and f"{cluster}/" in state.read_text(errors="replace"):
            shutil.rmtree(container, ignore_errors=True)
    for link in (root / LOG_LINKS).glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(cluster):
            link.unlink(missing_ok=True)
    for name in FOLDERS:
        try:
            (root / name).rmdir()
        except OSError:  # not there, not empty, or mounted on
            pass
