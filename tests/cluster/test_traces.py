"""What a stopped cluster leaves outside its folder: ours is removed, another's is not."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.onemachine import traces

CLUSTER = Path("/cache/cluster")


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # short: a socket's path has at most 107 characters
        yield Path(folder)


def make_socket(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


def make_container(root: Path, name: str, rootfs: str) -> Path:
    folder = root / traces.CONTAINERS / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"config": {"rootfs": rootfs}}))
    return folder


def make_log_link(root: Path, name: str, target: str) -> Path:
    link = root / traces.LOG_LINKS / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


def test_nothing_of_a_dead_cluster_stays(root: Path) -> None:
    make_socket(root / traces.SHIM_SOCKETS / "dead").close()
    make_socket(root / traces.KUBELET_SOCKET).close()
    make_container(root, "ours", f"{CLUSTER}/nodes/node1/rootfs")
    make_log_link(root, "ours.log", f"{CLUSTER}/nodes/node1/pod-logs/a.log")
    for folder in traces.FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    traces.remove(CLUSTER, root)
    assert [path for path in root.rglob("*") if not path.is_dir()] == []
    assert not any((root / folder).exists() for folder in traces.FOLDERS)


def test_what_another_containerd_or_kubelet_uses_stays(root: Path) -> None:
    with make_socket(root / traces.SHIM_SOCKETS / "live"), make_socket(root / traces.KUBELET_SOCKET):
        kept = [
            root / traces.SHIM_SOCKETS / "live",
            root / traces.KUBELET_SOCKET,
            make_container(root, "theirs", "/var/lib/containerd/rootfs"),
            make_container(root, "similar", f"{CLUSTER}-2/rootfs"),
            make_log_link(root, "theirs.log", "/var/log/pods/a.log"),
        ]
        traces.remove(CLUSTER, root)
    assert all(path.is_symlink() or path.exists() for path in kept)


def test_a_machine_without_traces_is_fine(root: Path) -> None:
    traces.remove(CLUSTER, root)
