"""Rendered configuration agrees with the table of addresses and with itself."""

from __future__ import annotations

import ipaddress
import json
import tomllib
from pathlib import Path

import pytest
from e2e.cluster.onemachine import addons, addresses, controlplane, kwok, network, nodes, pki
from e2e.cluster.onemachine.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def test_networks_do_not_overlap_and_hold_the_addresses_taken_from_them() -> None:
    names = (addresses.POD_NETWORK, addresses.SERVICE_NETWORK, addresses.NODE_NETWORK, addresses.KWOK_NETWORK)
    networks = [ipaddress.ip_network(name) for name in names]
    assert not any(a.overlaps(b) for i, a in enumerate(networks) for b in networks[i + 1 :])
    pods, services, node_network, _ = networks
    assert all(ipaddress.ip_address(ip) in pods for ip in (addresses.BRIDGE_IP, *addresses.POD_RANGE))
    assert ipaddress.ip_address(addresses.DNS_SERVICE_IP) in services
    assert ipaddress.ip_address(addresses.KUBERNETES_SERVICE_IP) == services[1]
    assert all(ipaddress.ip_address(addresses.node_ip(node)) in node_network for node in addresses.NODES)


def test_containerd_of_each_node_is_valid_toml_with_folders_of_its_own(layout: Layout) -> None:
    configs = [tomllib.loads(nodes.containerd_config(layout, node, "pause:1")) for node in addresses.NODES]
    for key in ("root", "state"):
        assert len({config[key] for config in configs}) == len(addresses.NODES)
    cri = configs[0]["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == "pause:1"
    assert cri["cni"]["conf_dir"] == str(layout.config / "cni")


def test_kubelets_listen_on_their_own_address_and_write_to_their_own_cgroup(layout: Layout) -> None:
    one, two = (nodes.kubelet_config(layout, node) for node in addresses.NODES[:2])
    for key in ("address", "cgroupRoot", "podLogsDir", "containerRuntimeEndpoint", "tlsCertFile"):
        assert one[key] != two[key]
    assert one["clusterDNS"] == [addresses.DNS_SERVICE_IP]


def test_the_cni_hands_out_addresses_that_the_gateway_does_not_have(layout: Layout) -> None:
    ipam = json.loads(network.cni_config(layout.pod_addresses))["plugins"][0]["ipam"]["ranges"][0][0]
    assert ipam["gateway"] == addresses.BRIDGE_IP
    assert ipaddress.ip_address(ipam["rangeStart"]) > ipaddress.ip_address(addresses.BRIDGE_IP)


def test_every_kubelet_serves_the_address_that_the_api_server_calls(layout: Layout) -> None:
    by_name = {identity.name: identity for identity in pki.identities()}
    for node in addresses.NODES:
        assert f"IP:{addresses.node_ip(node)}" in by_name[node].serves
    assert f"IP:{addresses.APISERVER.ip}" in by_name["apiserver"].serves


def test_dns_answers_outside_names_in_a_block_of_their_own(layout: Layout) -> None:
    controlplane.coredns(Path("/bin"), layout)
    cluster_block, outside_block = (layout.config / "Corefile").read_text().split("\n. {", 1)
    assert "kubernetes" in cluster_block
    assert "template" not in cluster_block
    assert "NXDOMAIN" in outside_block


def test_an_unchanged_configuration_is_not_rewritten(layout: Layout) -> None:
    layout.pki.mkdir(parents=True)
    (layout.pki / "proxy.crt").write_text("certificate")
    first = controlplane.proxy(Path("/bin"), layout)
    before = (layout.config / "proxy.yaml").stat().st_mtime_ns
    second = controlplane.proxy(Path("/bin"), layout)
    assert (layout.config / "proxy.yaml").stat().st_mtime_ns == before
    assert first.digest() == second.digest()


def test_the_dns_service_has_an_endpoint_written_by_hand() -> None:
    by_kind = {item["kind"]: item for item in addons.objects()}
    assert "selector" not in by_kind["Service"]["spec"]
    assert by_kind["EndpointSlice"]["endpoints"][0]["addresses"] == [addresses.DNS.ip]
    label = by_kind["EndpointSlice"]["metadata"]["labels"]["kubernetes.io/service-name"]
    assert label == by_kind["Service"]["metadata"]["name"]


@pytest.mark.parametrize(("index", "clique"), [(0, "clique-0"), (17, "clique-0"), (18, "clique-1"), (71, "clique-3")])
def test_pretended_nodes_come_in_racks_of_eighteen(index: int, clique: str) -> None:
    node = kwok.node(index)
    assert node["metadata"]["labels"]["nvidia.com/gpu.clique"] == clique
    assert node["spec"]["taints"][0]["effect"] == "NoSchedule"
