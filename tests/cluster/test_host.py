"""What is checked before the machine is changed, over plain data."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.cluster.onemachine import host
from e2e.cluster.onemachine.addresses import CONTROL_PLANE_LISTENERS, Listener
from e2e.cluster.onemachine.console import ClusterError
from e2e.cluster.onemachine.host import OpenPort

SS_OUTPUT = """\
LISTEN 0 4096      127.0.0.1:5000       0.0.0.0:*    users:(("docker-registry",pid=812,fd=7))
LISTEN 0 128         0.0.0.0:22         0.0.0.0:*    users:(("sshd",pid=1,fd=3))
LISTEN 0 4096              *:10250            *:*    users:(("kubelet",pid=99,fd=20))
LISTEN 0 4096          [::1]:2379          [::]:*
LISTEN 0 4096   127.0.0.53%lo:53       0.0.0.0:*    users:(("resolver",pid=5,fd=1))
"""


def test_open_ports_are_read_with_their_owners() -> None:
    assert host.parse_open_ports(SS_OUTPUT) == [
        OpenPort("127.0.0.1", 5000, "docker-registry (pid 812)"),
        OpenPort("*", 22, "sshd (pid 1)"),
        OpenPort("*", 10250, "kubelet (pid 99)"),
        OpenPort("::1", 2379, "an unknown process"),
        OpenPort("127.0.0.53", 53, "resolver (pid 5)"),
    ]


@pytest.mark.parametrize(
    ("taken_ip", "conflicts"),
    [("127.0.0.1", True), ("*", True), ("10.0.0.1", False), ("::1", False)],
    ids=["same address", "all addresses", "another address", "another family"],
)
def test_a_port_conflicts_only_on_an_address_that_is_wanted(taken_ip: str, conflicts: bool) -> None:
    wanted = [Listener("127.0.0.1", 5000, "registry")]
    found = host.port_conflicts(wanted, [OpenPort(taken_ip, 5000, "other (pid 7)")])
    assert found == (["registry needs 127.0.0.1:5000, which other (pid 7) listens on"] if conflicts else [])


def test_another_port_of_the_same_address_does_not_conflict() -> None:
    assert host.port_conflicts([Listener("127.0.0.1", 5000, "registry")], [OpenPort("127.0.0.1", 5001, "x")]) == []


def test_no_two_parts_of_the_cluster_want_the_same_address() -> None:
    addresses = [(one.ip, one.port) for one in CONTROL_PLANE_LISTENERS]
    assert len(addresses) == len(set(addresses))


def test_a_full_disk_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"GiB free.*HEADRACE_CACHE"):
        host.require_disk(tmp_path / "not" / "yet" / "there", 1 << 60)
    host.require_disk(tmp_path, 1)


def test_missing_commands_are_named_by_their_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SEARCH_PATH", "/nonexistent")
    monkeypatch.setattr(host, "REQUIRED", {"zstd": "zstd", "/nonexistent/bridge": "containernetworking-plugins"})
    assert host.missing_packages() == ["containernetworking-plugins", "zstd"]
