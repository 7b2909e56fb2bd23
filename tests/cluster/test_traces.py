"""What a stopped cluster leaves outside its folder: ours is removed, another's is not."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.onemachine import cgroups, network, traces

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


def test_cgroups_of_all_nodes_go_from_every_hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    for hierarchy in ("cpu,cpuacct", "memory", "unified"):
        (tmp_path / hierarchy / cgroups.TREE / "node1" / "kubepods" / "pod1").mkdir(parents=True)
        (tmp_path / hierarchy / "cgroup.procs").touch()
        (tmp_path / hierarchy / "another").mkdir()
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    cgroups.remove()
    cgroups.remove()
    assert not list(tmp_path.glob(f"*/{cgroups.TREE}"))
    assert len(list(tmp_path.glob("*/another"))) == 4


def test_only_results_of_our_pods_and_of_dead_namespaces_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CNI_RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "live-namespace").touch()
    results = {
        f"{network.POD_NETWORK_NAME}-1-eth0": "{}",
        "cni-loopback-dead-lo": f'{{"result": {{"interfaces": [{{"sandbox": "{tmp_path}/dead-namespace"}}]}}}}',
        "cni-loopback-live-lo": f'{{"result": {{"interfaces": [{{"sandbox": "{tmp_path}/live-namespace"}}]}}}}',
        "another-1-eth0": "{}",
    }
    for name, content in results.items():
        (tmp_path / "results" / name).write_text(content)
    network._remove_cni_results()
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"cni-loopback-live-lo", "another-1-eth0"}
