"""What this machine must offer, checked before anything is changed; Debian packages that are missing are installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import cgroups
from .addresses import Listener
from .console import ClusterError, Progress, attempt, run

# Command (or file) that must be there -> Debian package that brings it.
REQUIRED = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "docker-registry": "docker-registry",
    "nft": "nftables",
    "iptables": "iptables",  # the CNI's portmap plugin
    "conntrack": "conntrack",
    "ip": "iproute2",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "zstd": "zstd",
}
SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"  # Debian's own, also for a bare environment

GIB = 1 << 30
MIN_FREE_BYTES = 6 * GIB  # a running cluster with images; the first build of everything checks for more
MIN_FREE_FOR_BUILD_BYTES = 14 * GIB  # Go's caches take about 5
MIN_FREE_FOR_IMAGES_TOO_BYTES = 24 * GIB  # each of three nodes unpacks the engine's image: 4 each


@dataclass(frozen=True)
class OpenPort:
    """A listening TCP socket of this machine; ip is `*` for all addresses."""

    ip: str
    port: int
    owner: str


def require_root() -> None:
    """Raises ClusterError unless run by root."""
    if os.geteuid() != 0:
        raise ClusterError(
            "this needs root: it makes a bridge, mounts, cgroups and containers. Run it with sudo, or set KUBECONFIG "
            "to use another cluster"
        )


def missing_packages() -> list[str]:
    """Debian packages that are wanted and not there."""

    def is_there(wanted: str) -> bool:
        return Path(wanted).exists() if wanted.startswith("/") else shutil.which(wanted, path=SEARCH_PATH) is not None

    return sorted({package for wanted, package in REQUIRED.items() if not is_there(wanted)})


def install_missing_packages(progress: Progress) -> None:
    """Installs what is missing with apt-get. Raises ClusterError where that is not possible."""
    missing = missing_packages()
    if not missing:
        return
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        raise ClusterError(
            f"missing: {', '.join(missing)} (Debian's package names), and there is no apt-get to install them"
        )
    progress(f"apt-get install {' '.join(missing)}")
    # A package that starts a service of its own (registry, containerd) would take our ports.
    policy = Path("/usr/sbin/policy-rc.d")
    had_policy = policy.exists()
    if not had_policy:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    install = [*apt, "install", "-y", "--no-install-recommends", *missing]
    try:
        if attempt(install, timeout_seconds=600) is None:
            run([*apt, "update"], "apt-get update", timeout_seconds=300)
            run(install, f"installing {' '.join(missing)}", timeout_seconds=600)
    finally:
        if not had_policy:
            policy.unlink()


def require_kernel_features() -> None:
    """Raises ClusterError if containers, or a node as one cgroup tree, are not possible here."""
    attempt(["modprobe", "overlay"])
    attempt(["modprobe", "br_netfilter"])
    filesystems = Path("/proc/filesystems").read_text()
    if not re.search(r"\boverlay\b", filesystems):
        raise ClusterError(
            "this kernel has no overlay filesystem (`modprobe overlay` did not bring it); containers need it"
        )
    cgroups.require_support()
    if not Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        raise ClusterError(
            "this kernel has no br_netfilter (`modprobe br_netfilter` did not bring it); Services need it"
        )


def require_disk(folder: Path, free_bytes: int) -> None:
    """Raises ClusterError if less than free_bytes are free where `folder` is or will be."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < free_bytes:
        raise ClusterError(
            f"{existing} has {free / GIB:.1f} GiB free and {free_bytes / GIB:.0f} GiB are needed; "
            "free some, or set HEADRACE_CACHE to a folder on a larger disk"
        )


def parse_open_ports(ss_output: str) -> list[OpenPort]:
    """Reads `ss -Hltnp`: one listening TCP socket a line."""
    ports = []
    for line in ss_output.splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        ip, _, port = words[3].rpartition(":")
        owner = re.search(r'\("([^"]+)",pid=(\d+)', line)
        ip = ip.strip("[]").partition("%")[0]
        ip = "*" if ip in ("0.0.0.0", "::", "*") else ip.removeprefix("::ffff:")
        ports.append(OpenPort(ip, int(port), f"{owner[1]} (pid {owner[2]})" if owner else "an unknown process"))
    return ports


def port_conflicts(wanted: Iterable[Listener], taken: Iterable[OpenPort]) -> list[str]:
    """One sentence for each wanted address that another socket already has."""
    by_port: dict[int, list[OpenPort]] = {}
    for port in taken:
        by_port.setdefault(port.port, []).append(port)
    return [
        f"{listener.part} needs {listener.ip}:{listener.port}, which {port.owner} listens on"
        for listener in wanted
        for port in by_port.get(listener.port, [])
        if port.ip in ("*", listener.ip)
    ]


def require_free_ports(wanted: Iterable[Listener]) -> None:
    """Raises ClusterError naming every wanted port that is taken, and by whom."""
    conflicts = port_conflicts(wanted, parse_open_ports(run(["ss", "-Hltnp"], "reading open ports")))
    if conflicts:
        raise ClusterError("ports are in use:\n  " + "\n  ".join(conflicts) + "\n  stop those processes and try again")
