"""A node as one cgroup tree, so that everything on it can be frozen, or killed at once like a power cut.

Version 1 hierarchies: the kubelet writes pods below /headrace/NODE in every controller; the freezer and pids
hierarchies also hold kubelet, containerd and its shims, which start inside.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from .console import ClusterError
from .daemons import is_live

ROOT = Path("/sys/fs/cgroup")
TREE = "headrace"
WHOLE_NODE = ("freezer", "pids")  # the hierarchies that hold a node's daemons too, not only its pods


def require_support() -> None:
    """Raises ClusterError unless the version 1 hierarchies that are used are mounted."""
    missing = [name for name in (*WHOLE_NODE, "cpu", "memory", "cpuset") if not (ROOT / name / "cgroup.procs").exists()]
    if missing:
        raise ClusterError(
            f"cgroup version 1 hierarchies are not mounted at {ROOT}: {', '.join(missing)}. Boot with "
            "systemd.unified_cgroup_hierarchy=0 (nodes are frozen and killed as cgroup trees of version 1), or set "
            "KUBECONFIG to use another cluster"
        )


def path_of(node: str) -> str:
    """The node's tree, as the kubelet's cgroupRoot names it."""
    return f"/{TREE}/{node}"


def whole_node(node: str) -> list[Path]:
    """The cgroups that the node's daemons start in."""
    return [ROOT / hierarchy / TREE / node for hierarchy in WHOLE_NODE]


def create(node: str) -> None:
    """Makes the node's cgroup in every hierarchy; processes that enter it run."""
    for hierarchy in _hierarchies():
        (hierarchy / TREE / node).mkdir(parents=True, exist_ok=True)
    cpuset = ROOT / "cpuset"
    for limit in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cpuset, which then can hold no process
        for group in (cpuset / TREE, cpuset / TREE / node):
            if not (group / limit).read_text().strip():
                (group / limit).write_text((cpuset / limit).read_text())
    set_frozen(node, False)


def set_frozen(node: str, frozen: bool) -> None:
    """Stops or continues every process of the node. Raises ClusterError if there is none, or if they do not freeze in
    time. A frozen tree without processes would hold the next one that enters it, before it runs."""
    if frozen and not _pids(node):
        raise ClusterError(f"{node} is not running")
    _set_state(node, frozen)


def _set_state(node: str, frozen: bool) -> None:
    state = ROOT / "freezer" / TREE / node / "freezer.state"
    if not state.exists():
        return
    target = "FROZEN" if frozen else "THAWED"
    deadline = time.monotonic() + 10
    state.write_text(target)
    while state.read_text().strip() != target:
        if time.monotonic() > deadline:
            raise ClusterError(f"{node} is still {state.read_text().strip()} after 10 s, not {target}")
        time.sleep(0.02)


def kill(node: str) -> None:
    """Kills every process of the node at one instant: none sees another die first. Does nothing if there is none."""
    if not (ROOT / "freezer" / TREE / node).exists():
        return
    deadline = time.monotonic() + 10
    while pids := _pids(node):
        if time.monotonic() > deadline:
            raise ClusterError(f"{node}: processes {pids[:10]} do not die")
        _set_state(node, True)  # the last ones may be gone by now, which is as well
        for pid in _pids(node):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _set_state(node, False)
        time.sleep(0.05)


def remove() -> None:
    """Removes the trees of all nodes; their processes must be dead."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / TREE, topdown=False):
            deadline = time.monotonic() + 2
            while True:
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError as error:  # busy until the kernel has buried its last process
                    if time.monotonic() > deadline:
                        raise ClusterError(f"cannot remove the cgroup {folder}: {error}") from None
                    time.sleep(0.05)


def _hierarchies() -> list[Path]:
    """Every hierarchy, with the version 2 one beside them that runc writes to; links to `cpu,cpuacct` count once."""
    return sorted({path.resolve() for path in ROOT.iterdir() if (path / "cgroup.procs").exists()})


def _pids(node: str) -> list[int]:
    """Processes anywhere below the node, without zombies (a zombie is in the root group, or listed until reaped)."""
    pids: set[int] = set()
    for group in whole_node(node):
        for listing in group.rglob("cgroup.procs"):
            try:
                pids.update(int(line) for line in listing.read_text().split())
            except (FileNotFoundError, OSError):
                continue
    return sorted(pid for pid in pids if is_live(pid))
